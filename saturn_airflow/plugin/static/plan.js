// The plan page: asks for the sweep now and again and draws what it hears.
import { Chart } from "./chart.js";
import { colorOf, toneOf } from "./colors.js";
import { getJob, getPlan, poll } from "./data.js";
import { Details } from "./details.js";
import { byId, fill, h, say } from "./dom.js";
import { clock, devices, strategy } from "./format.js";
import { compareAddress, isWebAddress, logAddress, runAddress } from "./links.js";
import { advanced, bestOf, countsOf, inWords, metricOf } from "./sweep.js";
import { drawTotals } from "./totals.js";
import { Table } from "./table.js";

const SECONDS = 3;
const at = document.documentElement.dataset;
const ask = { sweep: asked(), node: "", layers: "both", search: "", hidden: new Set(), chosen: null, known: null };
// What the server said last, and what that is by now.
let said = null;
let page = null;
let curves = {};
let heard = 0;

const chart = new Chart(byId("chart"), choose);
const table = new Table(byId("table"), choose);
const details = new Details(byId("details"), () => choose(null));

// The sweep to show, from this page's address or from the one of Airflow's page around it.
function asked() {
  const own = new URLSearchParams(location.search).get("sweep");
  if (own) return own;
  try {
    return new URLSearchParams(window.parent.location.search).get("sweep");
  } catch {
    return null;
  }
}

// found: null where nothing has changed but the time.
function hear(found) {
  if (found && page && page.sweep !== found.sweep) forget();
  if (found) curves = found.curves_whole ? found.curves : { ...curves, ...found.curves };
  page = found ?? advanced(said.answer, (Date.now() - said.at) / 1000);
  heard = Date.now();
  draw();
  say(notice());
  // Only what was drawn is known: what could not be is asked for anew.
  if (found) said = { answer: found, at: heard, tag: found.tag, since: found.curves_at };
  if (ask.chosen && found && page.live) learn(ask.chosen);
  return page.live;
}

// What was chosen in one sweep means nothing in another.
function forget() {
  Object.assign(ask, { chosen: null, known: null, node: "" });
  said = null;
  curves = {};
}

function notice() {
  if (page.unreadable) return "The plan is kept by a custom XCom backend, where this page can't read it.";
  const told = Object.entries(page.left_out).map(([node, why]) => `${node} takes no part: ${why}.`);
  if (page.missing_pools.length) told.unshift(`Tasks wait for pools that Airflow does not have: ${page.missing_pools.join(", ")}. Run saturn pools on the scheduler's machine.`);
  if (page.totals.deadline?.planned === false) told.push("The deadline can't be met: all is planned to end as early as possible.");
  if (page.live) told.push(...brokenDeadlines(page.totals));
  const counts = countsOf(page.jobs);
  if (page.state === "cancelled") told.unshift(`Cancelled: ${inWords(counts)}.`);
  if (page.state === "failed") {
    const failed = page.jobs.filter((job) => toneOf(job.status) === "bad").map((job) => job.name);
    if (failed.length) told.unshift(`${failed.length} of ${page.jobs.length} jobs came to nothing: ${failed.slice(0, 4).join(", ")}${failed.length > 4 ? " …" : "."}`);
  }
  if (page.rounds.length || page.missing_pools.length) return told.join(" ");
  if (page.live) return "There is no plan yet.";
  const failed = page.stages.find(({ state }) => state === "failed");
  return `No plan was made; ${failed ? `the log of ${failed.name} says` : "the logs of the tasks say"} why.`;
}

function brokenDeadlines({ expected_late, breaks = [] }) {
  const at = (seconds) => (seconds === null ? "never" : `at ${clock(page.origin + seconds, page.origin)}`);
  const own = Number.isFinite(expected_late) ? [`The deadline is expected to be missed: other sweeps came, and all is done ${at(expected_late)}.`] : [];
  return [...own, ...breaks.map((one) => `This sweep breaks the deadline of another one, ${at(one.at)}: that is expected to be done ${at(one.expected)}, without this one ${at(one.without)}.`)];
}

function draw() {
  byId("content").hidden = false;
  drawTop();
  drawStages();
  drawTotals(byId("totals"), page, choose);
  drawLegend();
  drawJobs();
}

function drawJobs() {
  const shown = new Set(page.jobs.filter(isShown).map((job) => job.name));
  const planned = page.rounds.length > 0;
  byId("chart").closest("section").hidden = !planned;
  byId("jobs").hidden = !page.jobs.length;
  if (planned) chart.draw(page, { ...ask, shown });
  const metric = metricOf(page);
  table.draw(page.jobs, shown, ask.chosen, { metric, curves, best: page.best?.job ?? bestOf(page.jobs, metric)?.name, now: page.now, origin: page.origin });
  fill(byId("count"), [shown.size, page.jobs.length], () => (shown.size < page.jobs.length ? `${shown.size} of ${page.jobs.length}` : String(page.jobs.length)));
  const job = page.jobs.find((one) => one.name === ask.chosen);
  if (job) details.draw(job, ask.known, curves[job.name], page.origin);
  else details.close();
}

function isShown(job) {
  const bar = job.bars.at(-1);
  if (bar && job.bars.every((one) => ask.hidden.has(one.technique))) return false;
  if (ask.node && !job.bars.some((one) => one.node === ask.node)) return false;
  if (!ask.search) return true;
  const text = [job.name, job.status.replaceAll("_", " "), job.reason ?? "", ...job.bars.flatMap((one) => [strategy(one), devices(one)])].join(" ");
  return ask.search.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

function drawTop() {
  byId("name").textContent = page.sweep;
  // Airflow's page says it around this one.
  byId("run").textContent = window.parent === window ? `${at.dag} · ${at.run}` : "";
  const state = byId("state");
  state.hidden = false;
  state.textContent = page.state;
  state.className = `chip ${toneOf(page.state)}`;
  byId("sweep-choice").hidden = page.sweeps.length < 2;
  fill(byId("sweep"), page.sweeps, () => page.sweeps.map((name) => h("option", { value: name }, name)));
  byId("sweep").value = page.sweep;
  fill(byId("links"), [page.sweep, page.mlflow], () => [
    h("a", { href: compareAddress(at.dag, page.sweep, null, at.run) }, "Compare"),
    window.parent === window && h("a", { href: runAddress() }, "DAG run"),
    isWebAddress(page.mlflow) && h("a", { href: page.mlflow, target: "_blank", rel: "noopener", "data-leave": true }, "MLflow run"),
  ]);
  byId("live").classList.toggle("on", page.live);
  tick();
}

function tick() {
  if (!page) return;
  const ago = Math.round((Date.now() - heard) / 1000);
  byId("live").textContent = page.live ? (ago > 2 * SECONDS ? `live, ${ago} s ago` : "live") : "";
}

function drawStages() {
  fill(byId("stages"), page.stages, () =>
    page.stages.map((stage) =>
      h(
        "li",
        { class: stage.state, "aria-label": `${stage.name}: ${stage.state}${stage.all ? `, ${stage.done} of ${stage.all} tasks` : ""}` },
        ...stageParts(stage),
      ),
    ),
  );
}

function stageParts({ name, all, done, task }) {
  const told = [name, all ? h("span", { class: "muted" }, ` ${done}/${all}`) : null];
  if (!task) return told;
  const title = task.map_index === null ? `Tasks of ${name}` : `Log of ${name}`;
  return [h("a", { href: logAddress(task), title, "data-leave": true }, ...told)];
}

function drawLegend() {
  const used = new Map();
  for (const job of page.jobs) for (const bar of job.bars) used.set(bar.technique, (used.get(bar.technique) ?? 0) + 1);
  const names = [...used.keys()].sort();
  fill(byId("legend"), [names, [...ask.hidden]], () =>
    names.map((name) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String(!ask.hidden.has(name)),
          onclick: () => {
            if (!ask.hidden.delete(name)) ask.hidden.add(name);
            drawLegend();
            drawJobs();
            [...byId("legend").children].find((one) => one.textContent === name)?.focus();
          },
        },
        h("span", { class: "swatch", color: colorOf(name) }),
        name,
      ),
    ),
  );
  byId("node-choice").hidden = page.nodes.length < 2;
  fill(byId("node"), page.nodes, () => [h("option", { value: "" }, "all"), ...page.nodes.map((node) => h("option", { value: node.name }, `${node.name} (${node.devices})`))]);
  byId("node").value = ask.node;
}

async function choose(name) {
  const before = ask.chosen;
  ask.chosen = name;
  ask.known = null;
  drawJobs();
  if (name === null) {
    table.rows.get(before)?.querySelector("button").focus();
    return;
  }
  details.focus();
  await learn(name);
}

async function learn(name) {
  const { sweep } = page;
  const known = await getJob(sweep, name).catch((error) => ask.known ?? error.message);
  if (ask.chosen !== name || page.sweep !== sweep) return;
  ask.known = known;
  drawJobs();
}

byId("search").addEventListener("input", (event) => {
  ask.search = event.target.value.trim();
  drawJobs();
});
for (const name of ["node", "layers"]) {
  byId(name).addEventListener("change", (event) => {
    ask[name] = event.target.value;
    drawJobs();
  });
}
byId("sweep").addEventListener("change", (event) => {
  ask.sweep = event.target.value;
  forget();
  const address = new URL(location.href);
  address.searchParams.set("sweep", ask.sweep);
  history.replaceState(null, "", address);
  askNow();
});
byId("zoom-in").addEventListener("click", () => chart.view(0.6));
byId("zoom-out").addEventListener("click", () => chart.view(1 / 0.6));
byId("earlier").addEventListener("click", () => chart.view(1, -0.3));
byId("later").addEventListener("click", () => chart.view(1, 0.3));
byId("zoom-reset").addEventListener("click", () => chart.showAll());
document.addEventListener("theme", () => page && draw());
setInterval(tick, 1000);
const askNow = poll({ ask: () => getPlan(ask.sweep, said?.since, said?.tag), draw: hear, say, seconds: SECONDS });
