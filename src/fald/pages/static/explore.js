// Sliders over the settings of a study; every move asks the server, and only the newest answer is shown.
"use strict";

const byId = (id) => document.getElementById(id);
const SLIDERS = {
  local_steps: ["Local steps K", "steps at a site between exchanges"],
  step_size: ["Step size η", "smaller is more accurate and slower"],
  correlation: ["Correlation ρ", "noise that sites share; 1 protects nobody"],
  num_participants: ["Participants S", "sites drawn per round, unless all take part"],
  num_rounds: ["Rounds", "exchanges in all, warm-up included"],
  batch_size: ["Batch size", "rows per gradient"],
};
const FIELDS = ["num_chains", "delta", "clip_norm", "noise", "scheme"];
const WORDS = {
  realised: "realised", paper: "as in paper",
  full: "not: all take part", "with-replacement": "with replacement", "without-replacement": "without (equal sites only)",
};

let about = null;

function current() {
  const values = {};
  for (const name of Object.keys(SLIDERS)) values[name] = about.grids[name][Number(byId(name).value)];
  for (const name of FIELDS) values[name] = byId(name).value;
  if (values.scheme === "full") values.num_participants = Object.keys(about.sites).length;
  return values;
}

function said(name, value) {
  if (name === "num_participants" && byId("scheme").value === "full") return `all ${value}`;
  if (name === "batch_size" && value >= Math.max(...Object.values(about.sites))) return "all rows";
  return number(value);
}

function build() {
  document.title = `${about.title} · fald explore`;
  byId("title").textContent = `Explore: ${about.title}`;
  byId("about").textContent = `${Object.keys(about.sites).length} sites, ${about.parameters.length} parameters. Accuracy, communication and privacy pull in different directions: move a slider and see all three.`;
  const sliders = Object.entries(SLIDERS).map(([name, [title, note]]) => {
    const input = html("input", { type: "range", id: name, min: 0, max: about.grids[name].length - 1, step: 1, "aria-describedby": `${name}-note` });
    input.addEventListener("input", moved);
    return html("div", { class: "control" },
      html("label", { for: name }, title, html("output", { id: `${name}-value`, for: name })),
      input, html("p", { class: "soft", id: `${name}-note` }, note));
  });
  byId("sliders").replaceChildren(...sliders);
  for (const name of ["noise", "scheme"]) {
    byId(name).replaceChildren(...about.choices[name].map((value) => html("option", { value }, WORDS[value] || value)));
  }
  for (const name of FIELDS) byId(name).addEventListener("change", moved);
  byId("over").addEventListener("change", moved);
  byId("reset").addEventListener("click", reset);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("clip-note").textContent = about.own_bounds
    ? "Norm of a row's gradient; 0: none, the model's own bound counts."
    : "Norm of a row's gradient, on which ε depends; 0: none, and ε is infinite.";
  reset();
}

function reset() {
  for (const name of Object.keys(SLIDERS)) byId(name).value = about.grids[name].indexOf(about.start[name]);
  for (const name of FIELDS) byId(name).value = about.start[name];
  moved();
}

function moved() {
  const values = current();
  byId("num_participants").disabled = values.scheme === "full";
  for (const name of Object.keys(SLIDERS)) {
    const text = said(name, values[name]);
    byId(`${name}-value`).textContent = text;
    byId(name).setAttribute("aria-valuetext", text);
  }
  byId("keys").textContent = keys(values);
  const wrong = check(values);
  if (wrong) complain({ message: wrong, hint: "The numbers below are those of the last valid settings." });
  else for (const line of [quick, slow]) line(values);
}

// One question at a time: while an answer is under way, only the newest position of the sliders waits.
function inTurn(update) {
  let wanted = null, busy = false;
  return async (values) => {
    wanted = values;
    if (busy) return;
    busy = true;
    while (wanted) {
      const next = wanted;
      wanted = null;
      try {
        await update(next, () => wanted === null);
      } catch (error) {
        complain({ message: "This page has lost its server", hint: "fald explore has ended; what you see may be old." });
      }
    }
    busy = false;
  };
}

const quick = inTurn(async (values) => {
  const point = await get("point", values);
  complain(point.problem || null);
  if (!point.problem) showPoint(point, values);
});

const slow = inTurn(async (values, fresh) => {
  byId("epsilon").classList.add("busy");
  const privacy = await get("privacy", values);
  if (!fresh()) return;
  setTimeout(strip);
  showPrivacy(privacy.problem ? { epsilon: null, reason: privacy.problem.message, hint: privacy.problem.hint } : privacy, values);
  const sweep = await get("sweep", { ...values, over: byId("over").value });
  if (fresh() && !sweep.problem) showSweep(sweep);
});

async function get(name, values) {
  const response = await fetch(`api/${name}?${new URLSearchParams(values)}`);
  const found = await response.json();
  return response.ok ? found : { problem: found };
}

function check(values) {
  if (!(Number(values.num_chains) >= 1) || !Number.isInteger(Number(values.num_chains))) return "Chains must be a whole number of at least 1.";
  if (!(Number(values.delta) > 0 && Number(values.delta) <= 0.5)) return "δ must be above 0 and at most 0.5.";
  if (values.clip_norm === "" || !(Number(values.clip_norm) >= 0)) return "The clipping norm must be 0 or more.";
  return "";
}

function complain(problem) {
  byId("banner").hidden = !problem;
  byId("banner").className = "banner bad";
  byId("problem").textContent = problem ? problem.message : "";
  byId("hint").textContent = problem ? problem.hint || "" : "";
}

// On a narrow screen the sliders hide the answers: the essence stays at the bottom.
function strip() {
  byId("strip").textContent = ["error", "cost", "epsilon"].map((id) => byId(id).textContent).join(" · ");
}

function light(id, [kind, word]) {
  byId(id).className = `word-${kind}`;
  byId(id).textContent = word;
}

function showPoint(point, values) {
  const p = point.predicted;
  if (p) {
    const worst = Math.max(p.bias, p.sd_error);
    byId("error").textContent = `${number(p.bias, 3)} sd`;
    light("error-word", worst <= 0.05 ? ["good", "Good: within 0.05"] : worst <= 0.2 ? ["warn", "Coarse: within 0.2"] : ["bad", "Poor: above 0.2"]);
    const draws = p.effective_draws >= 1 ? `${number(Math.round(p.effective_draws))} effective draws add ±${number(p.monte_carlo, 2)} sd by chance.` : "Too few rounds for one effective draw.";
    byId("error-note").textContent = [
      `Mean of ${p.bias_parameter}, in posterior sds; sds off by up to ${number(100 * p.sd_error, 3)}% (${p.sd_parameter}).`,
      `The start is forgotten after ${number(p.forgotten)} rounds. ${draws}`,
      ...point.warnings.map((text) => `Note: ${text}.`),
    ].join(" ");
  } else {
    byId("error").textContent = "none";
    light("error-word", ["bad", "Outside the range of the law"]);
    byId("error-note").textContent = [`${point.no_prediction}.`, ...point.warnings.map((text) => `Note: ${text}.`)].join(" ");
  }
  showBound(point.guaranteed, p);
  const c = point.communication;
  byId("cost").textContent = `${number(c.rounds)} rounds`;
  byId("cost-note").textContent = `${bytes(c.bytes_up)} from the sites and ${bytes(c.bytes_down)} to them in all; each participant sends ${bytes(c.bytes_up_per_round)} per round and takes up to ${number(c.gradients_per_site)} gradients.`;
  strip();
  const path = point.trajectory;
  lineChart(byId("path"), {
    series: path ? [{ name: "means", x: path.rounds, y: path.bias }, { name: "sds", x: path.rounds, y: path.sd_error, second: true }] : [],
    label: "Predicted error against rounds", x: "rounds", logX: true, logY: true, level: { value: 0.05, name: "0.05" },
  });
}

function showBound(g, p) {
  if (g.w2 !== null) {
    byId("bound").textContent = `W2 ≤ ${number(g.w2, 3)}`;
    const times = p ? ` The prediction is W2 = ${number(p.w2, 3)}, ${number(g.w2 / p.w2, 2)} times smaller.` : "";
    const certified = g.num_rounds !== null && p ? ` To certify the prediction would take ${number(g.num_rounds, 3)} rounds.` : "";
    const largest = Object.entries(g.terms).reduce((a, b) => (b[1] > a[1] ? b : a))[0].replaceAll("_", " ");
    byId("bound-note").textContent = `Posterior scale: ${p ? number(p.posterior_scale, 3) : "–"}.${times}${certified} Largest term: ${largest}.`;
  } else {
    byId("bound").textContent = "nothing";
    byId("bound-note").textContent = `Outside the range of the bounds: ${g.reason}.`;
  }
}

function showPrivacy(found, values) {
  byId("epsilon").classList.remove("busy");
  if (found.epsilon === null) {
    byId("epsilon").textContent = "ε = ∞";
    light("epsilon-word", ["bad", "No protection"]);
    byId("epsilon-note").textContent = `${found.reason}. ${found.hint || ""}`;
    return;
  }
  byId("epsilon").textContent = `ε = ${number(found.epsilon, 3)}`;
  light("epsilon-word", found.epsilon <= 1 ? ["good", "Strong"] : found.epsilon <= 8 ? ["warn", "Weak"] : ["bad", "No practical protection"]);
  const clip = Number(values.clip_norm);
  const clipped = clip > 0 ? ` Rows' gradients are cut to norm ${number(clip)}, which changes the target; the error leaves that out.` : "";
  byId("epsilon-note").textContent = `At δ = ${number(Number(values.delta))}, for one replaced row at the worst site, ${found.site}, seen by the server.${clipped}`;
}

function showSweep(found) {
  const name = SLIDERS[found.over][0];
  lineChart(byId("sweep"), {
    series: [
      { name: "error", x: found.x, y: found.error },
      { name: "thousand rounds", x: found.x, y: found.rounds.map((r) => r / 1000), second: true },
    ],
    label: `Error and rounds against ${name}`, x: name, logX: found.over !== "correlation", logY: true, mark: found.at,
  });
}

function keys(v) {
  const lines = ["[sampler]", `num-rounds = ${v.num_rounds}`, `local-steps = ${v.local_steps}`, `step-size = ${v.step_size}`, `num-chains = ${v.num_chains}`];
  if (v.correlation) lines.push(`correlation = ${v.correlation}`);
  if (v.scheme !== "full") lines.push(`participation = "${v.scheme}"`, `num-participants = ${v.num_participants}`);
  if (v.noise !== "realised") lines.push(`noise = "${v.noise}"`);
  if (v.batch_size < Math.max(...Object.values(about.sites))) lines.push(`batch-size = ${v.batch_size}`);
  if (Number(v.clip_norm) > 0) lines.push(`clip-norm = ${v.clip_norm}  # only for a private run`);
  return lines.join("\n");
}

fetch("api/about").then((response) => response.json()).then((found) => { about = found; build(); })
  .catch(() => complain({ message: "This page could not reach its server", hint: "Start fald explore again." }));
