// Nodes and devices over time, with the active sweeps of all DAGs.
import { Chart } from "./chart.js";
import { colorOf } from "./colors.js";
import { getCluster, poll } from "./data.js";
import { byId, fill, h, say } from "./dom.js";
import { clock, duration, percent } from "./format.js";
import { planAddress } from "./links.js";

const SECONDS = 10;
let chart = null;
let heard = null;

const groupOf = (number) => `sweep ${number + 1}`;

function row(sweep, number) {
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("span", { class: "swatch", color: colorOf(groupOf(number)), "aria-hidden": "true" }), ...name(sweep)),
    h("td", { class: "number counts" }, String(sweep.priority)),
    h("td", { class: "number counts" }, String(sweep.runs)),
    h("td", { class: "number counts" }, String(sweep.waits)),
    h("td", { class: "ends" }, ...end(sweep)),
    h("td", { class: "ends" }, ...sweep.before.map(({ sweep: other, why }) => h("p", { class: "reason" }, `${other}: ${why}`))),
  );
}

function name(sweep) {
  if (sweep.dag_id === null) return ["another sweep"];
  return [h("a", { href: planAddress(sweep.dag_id, sweep.run_id, sweep.sweep) }, `${sweep.dag_id} · ${sweep.sweep}`), h("p", { class: "reason" }, sweep.run_id)];
}

function end(sweep) {
  if (sweep.end === null) return ["– (a job fits on no node that is up)"];
  const at = (seconds) => clock(heard.at + seconds, heard.at);
  const due = sweep.deadline === null ? null : h("p", { class: "reason" }, `${sweep.end > sweep.deadline ? "after" : "before"} its deadline, ${at(sweep.deadline)}`);
  const by = sweep.by === null ? null : h("p", { class: "reason" }, `with ${percent(sweep.odds)} by ${at(sweep.by)}`);
  const broken = [
    ...sweep.broken_by.map((other) => `${other} breaks its deadline`),
    ...sweep.breaks.map((other) => `it breaks the deadline of ${other}`),
  ].map((told) => h("p", { class: "reason bad" }, told));
  const measured = sweep.measured ? h("p", { class: "reason" }, "of its trials; what its jobs want is known once they are planned") : null;
  return [at(sweep.end), h("p", { class: "reason" }, `in ${duration(sweep.end)}`), measured, by, due, ...broken];
}

function draw(found = null) {
  heard = found ?? heard;
  const { sweeps } = heard;
  byId("plan").hidden = byId("list").hidden = !sweeps.length;
  say(sweeps.length ? "" : "No sweep is active: none was planned that has not ended.");
  if (!sweeps.length) return true;
  const jobs = heard.jobs.map((job) => ({ ...job, group: groupOf(job.sweep) }));
  chart ??= new Chart(byId("chart"), () => {});
  chart.draw({ ...heard, jobs }, { shown: new Set(jobs.map((job) => job.name)), node: "", layers: "both", chosen: null });
  fill(byId("sweeps").tBodies[0], sweeps, () => sweeps.map(row));
  return true;
}

document.addEventListener("theme", () => heard && draw());
poll({ ask: () => getCluster(heard?.tag), draw, say, seconds: SECONDS });
