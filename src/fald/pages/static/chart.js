// Small charts as SVG: lines with a band or a level, readable by pointer, by keyboard and without either.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

function html(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Four significant digits, with thousands separated; very small and very large ones as powers of ten.
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "∞";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e7)) {
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}·10${superscript(Number(power))}`;
  }
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

// As many decimals as an interval of this width deserves, so that the numbers of a row align.
function decimal(value, width) {
  if (value === null || value === undefined) return "–";
  if (!(width > 0)) return number(value);
  const places = 2 - Math.floor(Math.log10(width / 3));
  if (places > 6 || places < -3) return number(value);
  return value.toLocaleString("en", { minimumFractionDigits: Math.max(0, places), maximumFractionDigits: Math.max(0, places) });
}

function superscript(power) {
  return String(power).replace(/[-0-9]/g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]));
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

function ticks(low, high, logarithmic, most, finest = 0) {
  if (logarithmic) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / most));
    const found = [];
    for (let power = first; power <= last; power += every) found.push(10 ** power);
    if (found.length > 1) return found;
    return [low, high];
  }
  const raw = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(finest, unit * [1, 2, 5, 10].find((factor) => factor * unit >= raw - 1e-12 * unit));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i += 1) found.push(i * step + 0);
  return found;
}

// Ticks as text, with as many digits as it takes to tell neighbours apart.
function labels(values, least) {
  const size = Math.max(...values.map(Math.abs)), step = Math.abs(values[1] - values[0]) || size || 1;
  const digits = Math.max(least, Math.min(16, Math.ceil(Math.log10(size / step || 1)) + 2));
  return values.map((value) => number(value, digits));
}

function range(values, logarithmic) {
  const usable = values.filter((v) => Number.isFinite(v) && (!logarithmic || v > 0));
  if (!usable.length) return null;
  let low = Math.min(...usable), high = Math.max(...usable);
  if (logarithmic) {
    if (high / low < 1.5) { low /= 1.5; high *= 1.5; }
    return [low, high];
  }
  // what differs in the last digits a number can hold is one level
  const one = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const pad = one ? Math.abs(high) * 0.05 || 1 : 0.05 * (high - low);
  return [low - pad, high + pad];
}

let charts = 0;

// Draw series {name, x, y, second} into a container, and again whenever its width changes.
function lineChart(container, options) {
  container.classList.add("chart");
  container.chart = options;
  if (!container.observer) {
    container.clipId = `clip-${(charts += 1)}`;
    container.readout = html("p", { class: "readout", "aria-live": "polite" });
    container.holder = html("div");
    container.append(container.holder, container.readout);
    container.observer = new ResizeObserver(() => { if (container.clientWidth !== container.drawn) drawChart(container); });
    container.observer.observe(container);
  }
  drawChart(container);
}

function drawChart(container) {
  const { series, label, x: xLabel, logX, logY, level, mark, focus } = container.chart;
  container.drawn = container.clientWidth;
  const width = Math.max(260, container.clientWidth), height = container.chart.height || 220;
  const margin = { left: 58, right: 12, top: 8, bottom: 38 };
  const usable = series.filter((s) => s.x.length);
  const xs = range(usable.flatMap((s) => s.x), logX);
  const levels = level ? [level.value] : [];
  const shown = (s) => (focus ? s.y.slice(Math.floor(s.y.length / 4)) : s.y);
  const ys = range([...usable.flatMap(shown), ...levels], logY);
  if (!xs || !ys) { container.holder.replaceChildren(html("p", { class: "soft" }, "Nothing to draw yet.")); return; }
  if (!logX) { xs[0] = Math.min(...usable.flatMap((s) => s.x)); xs[1] = Math.max(...usable.flatMap((s) => s.x)); }
  if (xs[0] === xs[1]) xs[1] += 1;
  const place = (value, [low, high], log, from, to) => {
    const at = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1);
    return from + at * (to - from);
  };
  const X = (value) => place(value, xs, logX, margin.left, width - margin.right);
  const Y = (value) => place(value, ys, logY, height - margin.bottom, margin.top);
  const ends = usable.map((s) => `${s.name || "value"} ${number(s.y[s.y.length - 1])}`).join(", ");
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": `${label}; at ${xLabel} ${number(usable[0].x[usable[0].x.length - 1])}: ${ends}. Arrow keys read the points.`,
  });
  const rows = ticks(ys[0], ys[1], logY, 5), names = labels(rows, logY ? 2 : 3);
  const clip = svg("clipPath", { id: `${container.clipId}` }, picture);
  svg("rect", { x: margin.left, y: 0, width: width - margin.left, height: height - margin.bottom + 2 }, clip);
  rows.forEach((value, i) => {
    svg("line", { class: "grid-line", x1: margin.left, x2: width - margin.right, y1: Y(value), y2: Y(value) }, picture);
    svg("text", { x: margin.left - 6, y: Y(value) + 4, "text-anchor": "end" }, picture).textContent = names[i];
  });
  const whole = usable.every((s) => s.x.every(Number.isInteger));
  const columns = ticks(xs[0], xs[1], logX, width < 450 ? 4 : 7, whole ? 1 : 0).filter((value) => !whole || Number.isInteger(value));
  labels(columns, 3).forEach((text, i) => {
    svg("text", { x: X(columns[i]), y: height - margin.bottom + 16, "text-anchor": "middle" }, picture).textContent = text;
  });
  svg("text", { x: (margin.left + width - margin.right) / 2, y: height - 4, "text-anchor": "middle" }, picture).textContent = xLabel;
  if (level) {
    svg("line", { class: "level", x1: margin.left, x2: width - margin.right, y1: Y(level.value), y2: Y(level.value) }, picture);
    svg("text", { x: width - margin.right, y: Y(level.value) - 4, "text-anchor": "end" }, picture).textContent = level.name;
  }
  for (const s of usable) {
    const points = s.x.map((x, i) => [x, s.y[i]])
      .filter(([x, y]) => Number.isFinite(y) && (!logY || y > 0) && (!logX || x > 0))
      .map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`);
    svg("polyline", { class: s.second ? "line second" : "line", points: points.join(" "), "clip-path": `url(#${container.clipId})` }, picture);
    if (points.length === 1) {
      const [cx, cy] = points[0].split(",");
      svg("circle", { class: s.second ? "dot second" : "dot", cx, cy, r: 4 }, picture);
    }
  }
  if (mark !== undefined && mark >= xs[0] && mark <= xs[1]) {
    svg("line", { class: "cross", x1: X(mark), x2: X(mark), y1: margin.top, y2: height - margin.bottom }, picture);
  }
  readable(container, picture, usable, X, margin, height, xLabel);
  const focused = container.holder.contains(document.activeElement);
  container.holder.replaceChildren(picture);
  if (focused) picture.focus();
}

function readable(container, picture, series, X, margin, height, xLabel) {
  const xs = series.reduce((longest, s) => (s.x.length > longest.length ? s.x : longest), []);
  const cross = svg("line", { class: "cross", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" }, picture);
  let at = xs.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(xs.length - 1, index));
    cross.setAttribute("x1", X(xs[at]));
    cross.setAttribute("x2", X(xs[at]));
    cross.setAttribute("visibility", "visible");
    const parts = series.map((s) => {
      const i = s.x.indexOf(xs[at]);
      return i < 0 ? "" : `${s.name ? s.name + " " : ""}${number(s.y[i])}`;
    });
    container.readout.textContent = `${xLabel} ${number(xs[at])}: ${parts.filter(Boolean).join(", ")}`;
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); container.readout.textContent = ""; };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * (picture.viewBox.baseVal.width / box.width);
    let best = 0;
    xs.forEach((value, i) => { if (Math.abs(X(value) - x) < Math.abs(X(xs[best]) - x)) best = i; });
    show(best);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at + step);
  });
}

// One interval as it settled: a band of low to high and a line for the mean, against rounds.
function settlingPicture(row) {
  const picture = svg("svg", { viewBox: "0 0 200 32", preserveAspectRatio: "none", "aria-hidden": "true" });
  const points = row.history.filter((p) => p.every((v) => v !== null));
  if (!points.length) return picture;
  const late = points.slice(Math.floor(points.length / 4));
  let low = Math.min(...late.map((p) => p[2])), high = Math.max(...late.map((p) => p[3]));
  const pad = 0.15 * (high - low) || 1;
  low -= pad; high += pad;
  const first = points[0][0], last = points[points.length - 1][0];
  const X = (r) => (last > first ? (200 * (r - first)) / (last - first) : 100);
  const Y = (v) => Math.max(-5, Math.min(37, 32 - (32 * (v - low)) / (high - low)));
  if (last === first) {
    svg("rect", { class: "band", x: 80, width: 40, y: Y(points[0][3]), height: Y(points[0][2]) - Y(points[0][3]) }, picture);
    return picture;
  }
  const top = points.map((p) => `${X(p[0])},${Y(p[3])}`), bottom = points.map((p) => `${X(p[0])},${Y(p[2])}`);
  svg("polygon", { class: "band", points: [...top, ...bottom.reverse()].join(" ") }, picture);
  svg("polyline", { class: "line", "vector-effect": "non-scaling-stroke", points: points.map((p) => `${X(p[0])},${Y(p[1])}`).join(" ") }, picture);
  return picture;
}
