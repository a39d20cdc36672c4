// What a sweep gave and took, night after night.
import { h } from "./dom.js";
import { duration, number, signed } from "./format.js";
import { planAddress } from "./links.js";

const SVG = "http://www.w3.org/2000/svg";
const NIGHTS = 30;

// The sweeps of one DAG and one operator that have ended, the oldest first, by name.
export function nights(sweeps) {
  const found = new Map();
  for (const sweep of [...sweeps].reverse()) {
    const name = `${sweep.dag_id} · ${sweep.sweep}`;
    if (typeof sweep.best?.value === "number") found.set(name, [...(found.get(name) ?? []), sweep]);
  }
  for (const [name, group] of found) {
    // Values of another metric are no part of the same line.
    const { metric } = group.at(-1).best;
    const alike = group.filter((sweep) => sweep.best.metric === metric).slice(-NIGHTS);
    if (alike.length > 1) found.set(name, alike);
    else found.delete(name);
  }
  return found;
}

export function trend(name, group) {
  const last = group.at(-1);
  const before = group.at(-2);
  const change = last.best.value - before.best.value;
  const metric = last.best.metric.replaceAll("_", " ");
  const took = last.actual_seconds;
  return h(
    "section",
    { class: "card trend", "aria-label": name },
    h("h2", {}, name),
    h("div", { class: "lines" }, line(`best ${metric}`, number(last.best.value), `${change < 0 ? "−" : "+"}${number(Math.abs(change))} since the night before`, group, (sweep) => sweep.best.value, number), margins(group), line("took", duration(took), `${signed(took / before.actual_seconds - 1)} since the night before`, group, (sweep) => sweep.actual_seconds, duration)),
    champion(group),
  );
}

// By how much each night's best was better than the champion of then, on the data of that night.
function margins(group) {
  const scored = group.filter((sweep) => typeof sweep.champion?.beaten_by === "number");
  if (scored.length < 2) return null;
  const by = scored.at(-1).champion.beaten_by;
  const won = scored.filter((sweep) => sweep.champion.beaten_by > 0).length;
  const note = `better in ${won} of ${scored.length} nights`;
  return line("over the champion", `${by < 0 ? "−" : "+"}${number(Math.abs(by))}`, note, scored, (sweep) => sweep.champion.beaten_by, number, 0);
}

// What became of the registered model that night.
function champion(group) {
  const said = group.at(-1).registered;
  if (!said) return null;
  return h("p", { class: "muted" }, said.version ? `${said.name} version ${said.version} @${said.alias}: ${said.reason}` : `Not registered: ${said.reason}`);
}

// base: a value to draw a line at.
function line(name, value, note, group, valueOf, show, base = null) {
  const [width, height, pad] = [260, 56, 6];
  const values = group.map(valueOf);
  const all = base === null ? values : [...values, base];
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = (index) => pad + ((width - 2 * pad) * index) / (group.length - 1);
  const y = (v) => height - pad - (height - 2 * pad) * (high > low ? (v - low) / (high - low) : 0.5);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}, ${group.length} nights: ${show(values[0])} to ${show(values.at(-1))}` });
  if (base !== null) svg.append(element("line", { x1: pad, x2: width - pad, y1: y(base), y2: y(base), class: "base" }));
  svg.append(element("path", { d: values.map((v, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(v).toFixed(1)}`).join(""), class: "main" }));
  group.forEach((sweep, index) => {
    const link = element("a", { href: planAddress(sweep.dag_id, sweep.run_id, sweep.sweep) });
    const dot = element("circle", { cx: x(index), cy: y(values[index]), r: sweep.registered?.version ? 4 : 2.6, class: sweep.registered?.version ? "champion" : "" });
    const title = element("title");
    title.textContent = `${moment(sweep)}: ${show(values[index])}${sweep.best ? `, ${sweep.best.job}` : ""}${sweep.registered?.version ? `, registered as version ${sweep.registered.version}` : ""}`;
    dot.append(title);
    link.append(dot);
    svg.append(link);
  });
  return h("div", {}, h("div", { class: "muted" }, name), h("div", { class: "value" }, value), h("div", { class: "note" }, note), svg);
}

// One may run a DAG several times a day.
export const moment = (sweep) => (sweep.start ? new Date(1000 * sweep.start).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : sweep.run_id);

function element(tag, attributes = {}) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}
