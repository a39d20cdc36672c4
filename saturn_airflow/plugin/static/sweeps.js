// The list of the latest sweeps.
import { toneOf } from "./colors.js";
import { getSweeps, poll } from "./data.js";
import { byId, fill, h, say } from "./dom.js";
import { duration, number, percent, signed } from "./format.js";
import { compareAddress, planAddress } from "./links.js";
import { nights, trend } from "./trend.js";

const SECONDS = 10;
const PARTS = [
  ["finished", "good"],
  ["failed", "bad"],
  ["not_planned", "left"],
  ["pruned", "dropped"],
  ["stopped", "dropped"],
];
const ask = { search: "", state: "", dag: "", limit: 50, picked: [] };
let heard = null;

const keyOf = (sweep) => JSON.stringify([sweep.dag_id, sweep.run_id, sweep.sweep]);

function isShown(sweep) {
  if (ask.state && sweep.state !== ask.state) return false;
  if (ask.dag && sweep.dag_id !== ask.dag) return false;
  const text = [sweep.dag_id, sweep.sweep, sweep.run_id, sweep.state, sweep.best?.job ?? ""].join(" ").toLowerCase();
  return ask.search.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function row(sweep) {
  return h(
    "tr",
    {},
    h("td", { class: "pick" }, h("input", { type: "checkbox", "aria-label": `Compare ${sweep.dag_id} ${sweep.run_id}`, checked: ask.picked.includes(keyOf(sweep)), onchange: (event) => pick(sweep, event.target.checked) })),
    h("th", { scope: "row" }, h("a", { href: planAddress(sweep.dag_id, sweep.run_id, sweep.sweep) }, `${sweep.dag_id} · ${sweep.sweep}`), h("p", { class: "reason" }, sweep.run_id)),
    h("td", {}, h("span", { class: `chip ${toneOf(sweep.state)}` }, sweep.state)),
    h("td", { class: "when" }, ...when(sweep)),
    h("td", { class: "wide" }, ...jobs(sweep)),
    h("td", { class: "best" }, ...(sweep.best ? [sweep.best.job, h("p", { class: "reason" }, `${sweep.best.metric.replaceAll("_", " ")} ${number(sweep.best.value)}${sweep.registered?.version ? ` · registered, version ${sweep.registered.version}` : ""}`)] : ["–"])),
    h("td", { class: "number" }, duration(sweep.actual_seconds), against(sweep)),
    h("td", { class: "number planned" }, sweep.is_comparable ? duration(sweep.makespan) : h("span", { class: "muted", title: "Its first plan was for the first rung only." }, "by rungs")),
    h("td", { class: "number busy" }, percent(sweep.utilisation)),
  );
}

function when({ start }) {
  if (!start) return ["–"];
  const at = new Date(1000 * start);
  return [at.toLocaleDateString(undefined, { dateStyle: "medium" }), h("p", { class: "reason" }, at.toLocaleTimeString(undefined, { timeStyle: "short" }))];
}

// Where a job came to nothing, there is less to compare than was planned.
function against({ actual_seconds: actual, makespan, is_comparable: is, jobs: counts }) {
  const whole = counts.finished + counts.not_planned === counts.all;
  return actual && makespan && is && whole ? h("p", { class: "reason" }, signed(actual / makespan - 1)) : null;
}

function jobs({ jobs: counts }) {
  if (!counts.all) return ["–"];
  const known = PARTS.filter(([name]) => counts[name]);
  const told = known.filter(([name]) => name !== "finished").map(([name]) => `${counts[name]} ${name.replaceAll("_", " ")}`);
  if (counts.round) told.unshift(`in round ${counts.round}`);
  return [
    h("span", { class: "progress", "aria-hidden": "true" }, ...known.map(([name, tone]) => h("span", { class: tone, share: `${(100 * counts[name]) / counts.all}%` }))),
    `${counts.finished}/${counts.all}`,
    told.length ? h("p", { class: "reason" }, told.join(", ")) : null,
  ];
}

// Two sweeps of one DAG can be compared: a third takes the place of the first that was picked.
function pick(sweep, is) {
  const key = keyOf(sweep);
  ask.picked = ask.picked.filter((other) => other !== key && JSON.parse(other)[0] === sweep.dag_id && JSON.parse(other)[2] === sweep.sweep);
  if (is) ask.picked = [...ask.picked.slice(-1), key];
  draw();
}

function drawCompare() {
  const link = byId("compare");
  // What was picked may have left the list since.
  const chosen = heard.sweeps.filter((sweep) => ask.picked.includes(keyOf(sweep)));
  link.hidden = !chosen.length;
  if (!chosen.length) return;
  const [after, before] = chosen;
  link.href = compareAddress(after.dag_id, after.sweep, before?.run_id, after.run_id);
  link.textContent = before ? "Compare the two" : "Compare with the one before";
}

function options(id, names) {
  fill(byId(id), names, () => [h("option", { value: "" }, "all"), ...names.map((name) => h("option", { value: name }, name))]);
  byId(id).value = ask[id];
}

function draw() {
  const { sweeps } = heard;
  const shown = sweeps.filter(isShown);
  byId("sweeps").hidden = byId("list").hidden = !sweeps.length;
  options("state", [...new Set(sweeps.map((sweep) => sweep.state))].sort());
  if (byId("dag")) options("dag", [...new Set(sweeps.map((sweep) => sweep.dag_id))].sort());
  fill(byId("sweeps").tBodies[0], [shown, ask.picked], () => shown.map(row));
  byId("count").textContent = shown.length < sweeps.length ? `${shown.length} of ${sweeps.length}` : `${sweeps.length}`;
  const found = [...nights(shown)].slice(0, 6);
  byId("trends").hidden = !found.length;
  fill(byId("trends"), found, () => found.map(([name, group]) => trend(name, group)));
  drawCompare();
}

function hear(found) {
  heard = found ?? heard;
  say(heard.sweeps.length ? "" : "There is no sweep yet. A DAG with a SaturnSweepOperator makes one each time it runs.");
  draw();
  return true;
}

byId("search").addEventListener("input", (event) => {
  ask.search = event.target.value.trim();
  draw();
});
for (const name of ["state", "dag"]) {
  byId(name)?.addEventListener("change", (event) => {
    ask[name] = event.target.value;
    draw();
  });
}
byId("limit").addEventListener("change", (event) => {
  ask.limit = Number(event.target.value);
  askNow();
});
const askNow = poll({ ask: () => getSweeps(ask.limit, heard?.tag), draw: hear, say, seconds: SECONDS });
