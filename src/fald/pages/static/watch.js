// Follows a run: asks for what is new once a second, and less often when the run has ended.
"use strict";

const byId = (id) => document.getElementById(id);
const STATUS = {
  waiting: ["", "Waiting for the first round"],
  running: ["", "Running"],
  stalled: ["warn", "No news"],
  died: ["bad", "The run died"],
  interrupted: ["warn", "Interrupted"],
  failed: ["bad", "Stopped with an error"],
  finished: ["good", "Finished"],
};
const CHARTS = {
  energy: { title: "Energy", note: "Falls, then fluctuates around a level; the first rounds may lie outside the picture.", focus: true },
  r_hat: { title: "R-hat (largest)", note: "Near 1 when chains agree.", level: { value: 1.01, name: "1.01" } },
  ess: { title: "Effective draws of each round", note: "Of the newest draws." },
  k_hat: { title: "k-hat", note: "Tails of the weights; above 0.7 they cannot be trusted.", level: { value: 0.7, name: "0.7" } },
  epsilon: { title: "ε spent", note: "Never decreases; for the worst site." },
};

let seen = "", whole = {}, silent = 0;

async function ask() {
  let pause = 1000;
  try {
    const response = await fetch(`api/state?seen=${encodeURIComponent(seen)}`);
    if (!response.ok) throw new Error(`status ${response.status}`);
    const state = await response.json();
    silent = 0;
    if ("series" in state) whole = state;
    const changed = state.version !== seen;
    seen = state.version;
    show({ ...whole, ...state }, changed);
    if (["finished", "failed", "interrupted", "died"].includes(state.status)) pause = 4000;
  } catch (error) {
    silent += 1;
    if (silent > 2) banner("warn", "This page has lost its server", "fald watch has ended; what you see may be old.");
  }
  setTimeout(ask, pause);
}

function banner(kind, title, text) {
  byId("banner").className = `banner ${kind}`;
  if (byId("status").textContent !== title) byId("status").textContent = title;
  if (byId("says").textContent !== text) byId("says").textContent = text;
}

function show(state, changed) {
  showStatus(state);
  showProgress(state);
  if (!changed) return;
  byId("title").textContent = state.title;
  document.title = `${state.title} · fald`;
  const parts = [state.method && `method ${state.method}`, state.model && `${state.model} model`, `folder ${state.folder}`];
  if (state.parts > 1) parts.push(`resumed ${state.parts - 1} time${state.parts > 2 ? "s" : ""}`);
  byId("about").textContent = parts.filter(Boolean).join(" · ");
  showCards(state);
  showCharts(state);
  showIntervals(state);
  showSites(state);
}

function showStatus(state) {
  let [kind, title] = STATUS[state.status] || ["", state.status];
  const texts = {
    waiting: "Nothing is written yet: the run is reading its data or compiling.",
    running: "",
    stalled: `Nothing was written for ${duration(state.age)}. The process is there; a site may be slow, or the machine asleep.`,
    died: "Its process is gone and left no last word. What it saved is in its checkpoint: go on with fald run … --resume.",
    interrupted: `${sentence(state.message)} Go on with fald run … --resume.`,
    failed: sentence(state.message),
    finished: state.elapsed === null ? "" : `${number(state.round)} rounds in ${duration(state.elapsed)}. ${verdict(state)}`,
  };
  const objections = state.result && (state.result.complaints || []).length;
  if (state.status === "finished" && objections) [kind, title] = ["warn", "Finished, with objections"];
  banner(kind, title, texts[state.status] || "");
}

function sentence(text) {
  if (!text) return "";
  const first = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

function verdict(state) {
  const result = state.result;
  if (!result) return "";
  const report = result.report ? " The report is report.html in the folder." : "";
  if ((result.complaints || []).length) return result.complaints.map(sentence).join(" ") + report;
  if (result.verdict) return `Verdict: ${result.verdict}.${report}`;
  return `The diagnostics have no objection.${report}`;
}

function showProgress(state) {
  const total = state.rounds_total;
  byId("progress-part").hidden = !total;
  if (!total) return;
  const bar = byId("bar");
  bar.max = total;
  bar.value = state.status === "finished" ? total : Math.min(state.round, total);
  const parts = [`Round ${number(state.round)} of ${state.at_most ? "at most " : ""}${number(total)}`];
  if (["running", "stalled"].includes(state.status)) {
    if (state.rate) parts.push(state.rate >= 1 ? `${number(state.rate, 3)} rounds/s` : `${number(1 / state.rate, 3)} s per round`);
    if (state.elapsed !== null) parts.push(`${duration(state.elapsed)} so far`);
    if (state.eta !== null) parts.push(`${state.at_most ? "at most" : "about"} ${duration(state.eta)} left`);
  }
  byId("progress-text").textContent = parts.join(" · ");
}

function showCards(state) {
  const n = state.numbers, cards = [];
  const card = (title, value, note, kind) => {
    const description = html("dd", {}, value);
    const below = note ? html("dd", { class: `note${kind ? ` word-${kind}` : ""}` }, note) : null;
    cards.push(html("div", { class: "card" }, html("dt", {}, title), description, below));
  };
  if (n.draws !== null) card("Draws", number(n.draws), "all chains together");
  if (n.energy !== null) card("Energy", number(n.energy), "of the newest position");
  if (n.r_hat !== null) card("R-hat, largest", number(n.r_hat), n.r_hat <= 1.01 ? "chains agree" : "chains still differ", n.r_hat <= 1.01 ? "good" : "warn");
  if (n.ess !== null) card("Effective draws", number(Math.round(n.ess)), "of the newest round");
  if (n.k_hat !== null) card("k-hat", number(n.k_hat, 3), n.k_hat <= 0.7 ? "weights can be trusted" : "weights are unreliable", n.k_hat <= 0.7 ? "good" : "warn");
  if (state.privacy) {
    const budget = state.privacy.max_epsilon;
    const note = `at δ = ${number(state.privacy.delta)}${budget ? `, of ${number(budget)}` : ""}`;
    card("ε spent", n.epsilon === null ? "–" : number(n.epsilon, 3), note);
  }
  if (n.bytes_up !== null) card("Sent by sites", bytes(n.bytes_up), `${bytes(n.bytes_down)} sent to them`);
  byId("cards").replaceChildren(...cards);
}

function showCharts(state) {
  const holder = byId("charts");
  for (const [name, about] of Object.entries(CHARTS)) {
    const id = `chart-${name}`, data = state.series[name];
    let part = byId(id);
    if (!data) { if (part) part.remove(); continue; }
    if (!part) {
      part = html("section", { class: "panel", id }, html("h2", {}, about.title), html("div"), html("p", { class: "soft" }, about.note));
      holder.append(part);
    }
    let level = about.level;
    if (name === "epsilon" && state.privacy && state.privacy.max_epsilon) level = { value: state.privacy.max_epsilon, name: "budget" };
    lineChart(part.children[1], { series: [{ name: about.title, x: data.round, y: data.value }], label: `${about.title} against rounds`, x: "round", level, focus: about.focus });
  }
}

function showIntervals(state) {
  const final = state.result && state.result.summary;
  const rows = final ? finalRows(state) : state.intervals;
  byId("intervals-part").hidden = !rows.length;
  if (!rows.length) return;
  const body = rows.map((row) => html("tr", {},
    html("th", { scope: "row" }, row.name),
    html("td", { class: "picture" }, settlingPicture(row)),
    ...["mean", "low", "high"].map((name) => html("td", { class: `number ${name}` }, decimal(row[name], row.high - row.low)))));
  const percent = final ? 100 * (state.result.level || 0.95) : 95;
  const head = html("tr", {}, ...["Parameter", "Over the rounds"].map((t) => html("th", { scope: "col" }, t)),
    ...["Mean", "Low", "High"].map((t) => html("th", { scope: "col", class: "number" }, t)));
  byId("intervals").replaceChildren(html("thead", {}, head), html("tbody", {}, ...body));
  byId("intervals-title").textContent = final ? `${number(percent, 3)}% intervals` : `${number(percent, 3)}% intervals as they settle`;
  const hidden = final && state.result.num_parameters > rows.length ? ` The first ${rows.length} of ${number(state.result.num_parameters)} parameters.` : "";
  byId("intervals-note").textContent = (final ? "The numbers of summary.json." : "Of the draws so far; the first rounds may still be on their way.") + hidden;
}

function finalRows(state) {
  const tail = (100 * (1 - (state.result.level || 0.95))) / 2;
  const low = `${Number(tail.toPrecision(6))}%`, high = `${Number((100 - tail).toPrecision(6))}%`;
  return state.result.summary.map((row) => {
    const seen = state.intervals.find((other) => other.name === row.parameter);
    return { name: row.parameter, mean: row.mean, low: row[low], high: row[high], history: seen ? seen.history : [] };
  });
}

function showSites(state) {
  byId("sites-part").hidden = !state.sites.length;
  if (!state.sites.length) return;
  const columns = ["Site", "Rows", "Share"].concat(state.sites_answer ? ["Last answer", "Took", "Answered", "Missed"] : []);
  const head = html("tr", {}, ...columns.map((t, i) => html("th", { scope: "col", class: i && t !== "Last answer" ? "number" : null }, t)));
  const body = state.sites.map((site) => {
    const cells = [html("th", { scope: "row" }, site.name), cell(number(site.rows)), cell(`${(100 * site.share).toPrecision(3)}%`)];
    if (state.sites_answer) {
      const answered = site.counts.answered || 0;
      const missed = Object.values(site.counts).reduce((a, b) => a + b, 0) - answered;
      const kind = { answered: "good", late: "warn", refused: "bad", absent: "bad" }[site.status];
      cells.push(html("td", { class: kind ? `word-${kind}` : null }, site.status || "–"),
        cell(site.seconds === null ? "–" : `${number(site.seconds, 3)} s`), cell(number(answered)), cell(number(missed)));
    }
    return html("tr", {}, ...cells);
  });
  byId("sites").replaceChildren(html("thead", {}, head), html("tbody", {}, ...body));
  const late = state.sites.filter((s) => ["late", "refused", "absent"].includes(s.status)).map((s) => s.name);
  byId("sites-note").textContent = !state.sites_answer
    ? "All sites are simulated in one process, so none can be late."
    : late.length ? `No answer in the last round from: ${late.join(", ")}.` : "All sites answered in the last round.";
}

function cell(text) {
  return html("td", { class: "number" }, text);
}

ask();
