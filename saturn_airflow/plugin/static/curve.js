// Curves of losses and metrics as small pictures. They are drawn by hand: hundreds of them stand in one table.
import { h } from "./dom.js";
import { number } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const isLoss = (name) => name.endsWith("loss");

// What to draw: the metric that counts, and the training loss behind it where both have one scale.
function chosen(curves, metric) {
  const main = curves?.[metric]?.length > 1 ? metric : "loss";
  const behind = main !== "loss" && isLoss(main) ? "loss" : null;
  return [behind, main].filter((name) => curves?.[name]?.length > 1).map((name) => ({ name, points: curves[name] }));
}

// The least and the greatest value; a high beginning of a loss must not flatten all that follows. Of few points each
// counts: a part of such a curve is no beginning alone.
function range(series, isCut) {
  const first = Math.min(...series.flatMap(({ points }) => points[0][0]));
  const last = Math.max(...series.flatMap(({ points }) => points.at(-1)[0]));
  const after = series.some(({ points }) => points.length > 12) ? first + (last - first) * 0.08 : first;
  const values = (since) => series.flatMap(({ points }) => points.filter(([step]) => step >= since).map(([, value]) => value));
  const [low, high] = [Math.min(...values(first)), Math.max(...values(isCut ? after : first))];
  return { first, last, low, high: high > low ? high : low + (Math.abs(low) || 1) * 0.01 };
}

function path(points, { first, last, low, high }, width, height, pad) {
  const x = (step) => pad + ((width - 2 * pad) * (step - first)) / (last - first || 1);
  const y = (value) => height - pad - ((height - 2 * pad) * (Math.min(high, value) - low)) / (high - low);
  return { d: points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join(""), x, y };
}

const words = (name) => name.replaceAll("_", " ");

export function inWords({ name, points }) {
  return `${words(name)} ${number(points[0][1])} → ${number(points.at(-1)[1])} over ${points.at(-1)[0]} steps`;
}

// A curve for a row of a table; null where there is none yet.
export function sparkline(curves, metric) {
  return drawn(chosen(curves, metric));
}

// The same metric of a job in two sweeps, the earlier one behind.
export function sparklineOfTwo(before, after, metric) {
  const name = [before, after].some((curves) => curves?.[metric]?.length > 1) ? metric : "loss";
  return drawn([before, after].filter((curves) => curves?.[name]?.length > 1).map((curves) => ({ name, points: curves[name] })));
}

function drawn(series) {
  if (!series.length) return null;
  const [width, height, pad] = [104, 26, 3];
  const scale = range(series, true);
  const lines = series.map(({ name, points }, index) => {
    const isMain = index === series.length - 1;
    const { d, x, y } = path(points, scale, width, height, pad);
    const line = s("path", { d, class: isMain ? "main" : "behind" });
    const [step, value] = points.at(-1);
    return isMain ? [line, s("circle", { cx: x(step), cy: y(value), r: 2 })] : [line];
  });
  const label = inWords(series.at(-1));
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, s("title", {}, label), ...lines.flat());
}

// All curves of one job: losses together, each other metric by itself. Their points are means over some steps;
// `latest` has the last values by name.
export function curveCharts(curves, latest) {
  const names = Object.keys(curves ?? {}).filter((name) => curves[name].length > 1);
  const losses = names.filter(isLoss);
  return [losses, ...names.filter((name) => !isLoss(name)).map((name) => [name])]
    .filter((group) => group.length)
    .map((group) => chart(group.map((name) => ({ name, points: curves[name], last: latest?.[name] }))));
}

function chart(series) {
  const [width, height, pad] = [520, 120, 4];
  const scale = range(series, false);
  const lines = series.map(({ name, points }) => s("path", { d: path(points, scale, width, height, pad).d, class: name === "loss" ? "behind" : "main" }));
  const grid = [0, 0.5, 1].map((share) => {
    const y = pad + share * (height - 2 * pad);
    return s("line", { x1: 0, x2: width, y1: y, y2: y, class: "grid" });
  });
  const label = series.map(inWords).join("; ");
  return h(
    "figure",
    { class: "curve" },
    h("figcaption", {}, ...series.map(({ name, points, last }) => h("span", {}, h("i", { class: name === "loss" ? "behind" : "main" }), words(name), " ", h("strong", {}, number(last ?? points.at(-1)[1]))))),
    h("div", { class: "plot" }, h("span", { class: "high" }, number(scale.high)), h("span", { class: "low" }, number(scale.low)), s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...grid, ...lines)),
    h("div", { class: "steps" }, h("span", {}, `step ${scale.first}`), h("span", {}, String(scale.last))),
  );
}
