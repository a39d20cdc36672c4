// Two sweeps of a DAG side by side: what was planned, what it took, what it gave.
import { colorOf, toneOf } from "./colors.js";
import { sparklineOfTwo } from "./curve.js";
import { getPlan, getSweeps, Refused } from "./data.js";
import { byId, fill, h, say } from "./dom.js";
import { duration, number, percent, strategy } from "./format.js";
import { planAddress } from "./links.js";
import { countsOf, inWords, metricOf, valueOf } from "./sweep.js";
import { moment } from "./trend.js";

const at = document.documentElement.dataset;
const asked = new URLSearchParams(location.search);
const ask = { sweep: asked.get("sweep"), before: asked.get("before"), after: asked.get("after"), search: "", sort: "value" };
const LATEST = 200;
let sweeps = [];
let replaced = [];
let pages = {};
let calls = 0;

async function start() {
  ({ sweeps } = await getSweeps(LATEST));
  if (!sweeps.length) return say("This DAG has no sweep yet.");
  const names = [...new Set(sweeps.map((sweep) => sweep.sweep))].sort();
  const wanted = { ...ask };
  if (!names.includes(ask.sweep)) ask.sweep = sweeps[0].sweep;
  byId("sweep-choice").hidden = names.length < 2;
  fill(byId("sweep"), names, () => names.map((name) => h("option", { value: name }, name)));
  settle();
  // What an address asks for is never replaced without a word.
  replaced = ["sweep", "before", "after"].filter((id) => wanted[id] && wanted[id] !== ask[id]).map((id) => wanted[id]);
  await load();
}

// Without a choice: the latest two that have a result, or the one that was asked for and the one before it.
function settle() {
  const own = sweeps.filter((sweep) => sweep.sweep === ask.sweep);
  const has = (run) => own.some((sweep) => sweep.run_id === run);
  const ended = own.filter((sweep) => sweep.best);
  if (!has(ask.after)) ask.after = (ended[0] ?? own[0]).run_id;
  const earlier = own.slice(own.findIndex((sweep) => sweep.run_id === ask.after) + 1);
  if (!has(ask.before)) ask.before = (earlier.find((sweep) => sweep.best) ?? earlier[0] ?? own.at(-1)).run_id;
  for (const id of ["before", "after"]) {
    fill(byId(id), own, () => own.map((sweep) => h("option", { value: sweep.run_id }, `${moment(sweep)} · ${sweep.state} · ${sweep.run_id}`)));
    byId(id).value = ask[id];
  }
  byId("sweep").value = ask.sweep;
}

async function load() {
  const call = ++calls;
  const address = new URL(location.href);
  for (const id of ["sweep", "before", "after"]) address.searchParams.set(id, ask[id]);
  history.replaceState(null, "", address);
  const [before, after] = await Promise.all([ask.before, ask.after].map((run) => getPlan(ask.sweep, null, null, run)));
  if (call !== calls) return;
  pages = { before, after };
  const gone = replaced.length ? `Not among the latest ${LATEST} sweeps of this DAG: ${replaced.join(", ")}. Shown instead are those chosen above.` : "";
  say(gone || (ask.before === ask.after ? "This is one sweep beside itself: choose another." : ""));
  replaced = [];
  draw();
}

function draw() {
  const { before, after } = pages;
  byId("content").hidden = false;
  const runs = [
    [ask.before, "Plan before"],
    [ask.after, "Plan after"],
  ];
  fill(byId("links"), runs, () => runs.map(([run, name]) => h("a", { href: planAddress(at.dag, run, ask.sweep) }, name)));
  fill(byId("whole").tBodies[0], [before, after], () => whole(before, after));
  const metric = metricOf(after);
  byId("metric").textContent = metric.metric.replaceAll("_", " ");
  drawJobs(metric);
}

function whole(before, after) {
  const metric = metricOf(after);
  const lower = metric.mode !== "max";
  const same = before.best?.metric === after.best?.metric;
  const row = (name, of, show, change) => {
    const [a, b] = [of(before), of(after)];
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, show(a)), h("td", { class: "number" }, show(b)), h("td", { class: "number" }, change?.(a, b) ?? ""));
  };
  const text = (value) => value ?? "–";
  return [
    row("State", (page) => page.state, (state) => h("span", { class: `chip ${toneOf(state)}` }, state)),
    row("Best job", (page) => page.best?.job, text),
    row(`Best ${(after.best?.metric ?? metric.metric).replaceAll("_", " ")}`, (page) => page.best?.value, (value) => number(value), (a, b) => (same ? change(a, b, lower, number) : null)),
    row("Registered", (page) => page.registered, (said) => (said ? (said.version ? `version ${said.version} @${said.alias}` : "nothing new") : "–")),
    row("Jobs", (page) => inWords(countsOf(page.jobs)), text),
    row("Planned makespan", (page) => (page.totals.is_comparable ? page.totals.makespan : null), duration, (a, b) => change(a, b, true, duration)),
    row("Actual makespan", (page) => page.totals.elapsed, duration, (a, b) => (before.live || after.live ? "still running" : change(a, b, true, duration))),
    row("Actual against planned", offBy, (share) => (share === null ? "–" : `${share >= 0 ? "+" : "−"}${percent(Math.abs(share))}`)),
    row("Proven gap of the plan", (page) => page.totals.gap, (gap) => percent(gap ?? null, 1)),
    row("Rounds", (page) => (page.rounds_most > 1 ? page.rounds.length : null), (count) => (count === null ? "–" : String(count))),
    row("Devices busy", (page) => page.totals.utilisation, (share) => percent(share), (a, b) => change(a, b, false, (share) => percent(share))),
    row("Devices", (page) => page.totals.devices, text),
    row("Trials", (page) => page.profiling?.trials, text),
    row("Measuring took", (page) => page.profiling?.seconds, duration, (a, b) => change(a, b, true, duration)),
  ];
}

function offBy({ totals, live }) {
  return totals.is_comparable && totals.makespan && totals.elapsed && !live ? totals.elapsed / totals.makespan - 1 : null;
}

// How b differs from a, in green where that is better.
function change(a, b, isLowerBetter, show) {
  if (typeof a !== "number" || typeof b !== "number") return "";
  const by = b - a;
  const share = a ? ` (${by < 0 ? "−" : "+"}${percent(Math.abs(by / a), Math.abs(by / a) < 0.1 ? 1 : 0)})` : "";
  if (Math.abs(by) <= 1e-9 * Math.abs(a)) return "same";
  return h("span", { class: by < 0 === isLowerBetter ? "better" : "worse" }, `${by < 0 ? "−" : "+"}${show(Math.abs(by))}${share}`);
}

function paired() {
  const by = (page) => new Map(page.jobs.map((job) => [job.name, job]));
  const [before, after] = [by(pages.before), by(pages.after)];
  return [...new Set([...after.keys(), ...before.keys()])].map((name) => ({ name, before: before.get(name), after: after.get(name) }));
}

function drawJobs(metric) {
  const pairs = paired();
  const value = (job) => (job ? valueOf(job, metric) : null);
  const sign = metric.mode === "max" ? -1 : 1;
  const ratio = (a, b) => (a && b ? b / a : Infinity);
  const last = (x) => (x === null || x === undefined || Number.isNaN(x) ? Infinity : x);
  const keys = {
    value: ({ after }) => last(value(after) === null ? null : sign * value(after)),
    change: ({ before, after }) => (value(before) === null || value(after) === null ? Infinity : sign * (value(after) - value(before))),
    time: ({ before, after }) => ratio(before?.actual, after?.actual),
    name: ({ name }) => name,
  };
  const key = keys[ask.sort];
  const words = ask.search.toLowerCase().split(/\s+/);
  const text = ({ name, before, after }) => [name, ...[before, after].flatMap((job) => (job ? [job.status, ...job.bars.map(strategy)] : []))].join(" ").toLowerCase();
  const shown = pairs.filter((pair) => words.every((word) => text(pair).includes(word))).sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
  fill(byId("table").tBodies[0], [shown.map((pair) => pair.name), ask.before, ask.after, ask.sort], () => shown.map((pair) => row(pair, metric)));
  byId("count").textContent = shown.length < pairs.length ? `${shown.length} of ${pairs.length}` : String(pairs.length);
}

function row({ name, before, after }, metric) {
  const lower = metric.mode !== "max";
  const pair = (of, show, isLowerBetter) => {
    const [a, b] = [before && of(before), after && of(after)];
    const was = before && after && a !== null && a !== undefined;
    return [show(b ?? null), was ? h("p", { class: "reason", title: `was ${show(a)}` }, change(a, b, isLowerBetter, show) || `was ${show(a)}`) : null];
  };
  const status = (job) => h("span", { class: `chip ${toneOf(job.status)}` }, job.status.replaceAll("_", " "));
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, name, before && after ? null : h("p", { class: "reason" }, after ? "not in the sweep before" : "no longer there")),
    h("td", { class: "status" }, after ? status(after) : "–", before && before.status !== after?.status ? h("p", { class: "reason" }, `was ${before.status.replaceAll("_", " ")}`) : null),
    h("td", { class: "metric number" }, ...pair((job) => valueOf(job, metric), number, lower)),
    h("td", { class: "curve" }, sparklineOfTwo(pages.before.curves[name], pages.after.curves[name], metric.metric)),
    h("td", { class: "strategy" }, ...strategies(before, after)),
    h("td", { class: "actual number" }, ...pair((job) => job.actual ?? null, duration, true)),
    h("td", { class: "planned number" }, ...pair((job) => job.planned ?? null, duration, true)),
  );
}

function strategies(before, after) {
  const [a, b] = [before?.bars.at(-1), after?.bars.at(-1)];
  const told = b ? [h("span", { class: "swatch", color: colorOf(b.technique) }), strategy(b)] : ["–"];
  return a && (!b || strategy(a) !== strategy(b)) ? [...told, h("p", { class: "reason" }, `was ${strategy(a)}`)] : told;
}

const failed = (error) => say(error instanceof Refused ? error.message : `No word from Airflow (${error.message}); load the page again.`);

for (const id of ["before", "after", "sweep"]) {
  byId(id).addEventListener("change", (event) => {
    ask[id] = event.target.value;
    settle();
    load().catch(failed);
  });
}
byId("swap").addEventListener("click", () => {
  [ask.before, ask.after] = [ask.after, ask.before];
  settle();
  load().catch(failed);
});
byId("search").addEventListener("input", (event) => {
  ask.search = event.target.value.trim();
  drawJobs(metricOf(pages.after));
});
byId("sort").addEventListener("change", (event) => {
  ask.sort = event.target.value;
  drawJobs(metricOf(pages.after));
});
start().catch(failed);
