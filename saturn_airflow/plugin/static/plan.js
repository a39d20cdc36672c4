// The plan page: asks for the sweep now and again and draws what it hears.
import { Chart } from "./chart.js";
import { colorOf, toneOf } from "./colors.js";
import { getJob, getPlan, poll } from "./data.js";
import { Details } from "./details.js";
import { byId, fill, h, say } from "./dom.js";
import { devices, duration, number, percent, signed, strategy } from "./format.js";
import { isWebAddress, runAddress } from "./links.js";
import { Table } from "./table.js";

const SECONDS = 3;
const ask = { sweep: asked(), node: "", layers: "both", search: "", hidden: new Set(), chosen: null, known: null };
let page = null;
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

function hear(found) {
  if (page && page.sweep !== found.sweep) forget();
  page = found;
  heard = Date.now();
  draw();
  say(notice());
  if (ask.chosen && page.live) learn(ask.chosen);
  return page.live;
}

// What was chosen in one sweep means nothing in another.
function forget() {
  Object.assign(ask, { chosen: null, known: null, node: "" });
}

function notice() {
  if (page.unreadable) return "The plan is kept by a custom XCom backend, where this page can't read it.";
  const said = Object.entries(page.left_out).map(([node, why]) => `${node} takes no part: ${why}.`);
  if (page.totals.deadline?.planned === false) said.push("The deadline can't be met: all is planned to end as early as possible.");
  if (page.rounds.length) return said.join(" ");
  return page.live ? "There is no plan yet." : "No plan was made; the logs of the tasks say why.";
}

function draw() {
  byId("content").hidden = false;
  drawTop();
  drawStages();
  drawTotals();
  drawLegend();
  drawJobs();
}

function drawJobs() {
  const shown = new Set(page.jobs.filter(isShown).map((job) => job.name));
  const planned = page.rounds.length > 0;
  byId("chart").closest("section").hidden = !planned;
  byId("jobs").hidden = !page.jobs.length;
  if (planned) chart.draw(page, { ...ask, shown });
  table.draw(page.jobs, shown, ask.chosen);
  fill(byId("count"), [shown.size, page.jobs.length], () => (shown.size < page.jobs.length ? `${shown.size} of ${page.jobs.length}` : String(page.jobs.length)));
  const job = page.jobs.find((one) => one.name === ask.chosen);
  if (job) details.draw(job, ask.known);
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
  const state = byId("state");
  state.hidden = false;
  state.textContent = page.state;
  state.className = `chip ${toneOf(page.state)}`;
  byId("sweep-choice").hidden = page.sweeps.length < 2;
  fill(byId("sweep"), page.sweeps, () => page.sweeps.map((name) => h("option", { value: name }, name)));
  byId("sweep").value = page.sweep;
  fill(byId("links"), page.mlflow, () => [
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
        stage.name,
        stage.all ? h("span", { class: "muted" }, ` ${stage.done}/${stage.all}`) : null,
      ),
    ),
  );
}

function drawTotals() {
  const { totals, rounds, jobs, best, live } = page;
  const counts = {};
  for (const job of jobs) counts[job.status] = (counts[job.status] ?? 0) + 1;
  const cards = [];
  const card = (name, value, ...notes) => cards.push(h("div", {}, h("dt", {}, name), h("dd", {}, value), ...notes.filter(Boolean).map((note) => h("dd", { class: "note" }, note))));
  fill(byId("totals"), [totals, counts, best, live], () => {
    if (rounds.length) {
      const saved = totals.current_practice ? 1 - totals.makespan / totals.current_practice : null;
      card("Planned makespan", duration(totals.makespan), saved !== null && `${duration(totals.current_practice)} one after another on whole nodes`);
      const gap = totals.gap !== null && `gap ${percent(totals.gap, 1)}: no plan is better by more`;
      if (totals.value === null) card("Proven bound", duration(totals.lower_bound), gap);
      else card(`Planned ${totals.objective.replace("-", " ")}`, duration(totals.value), gap);
      card(
        live && totals.expected ? "So far" : "Actual makespan",
        duration(totals.elapsed),
        live && totals.expected ? `expected to end at ${duration(totals.expected)}` : totals.elapsed !== null && `${signed(totals.elapsed / totals.makespan - 1)} against the plan`,
      );
      card("Devices busy", percent(totals.elapsed === null ? totals.planned_utilisation : totals.utilisation), `planned ${percent(totals.planned_utilisation)} of ${totals.devices} devices`);
    }
    const told = Object.entries(counts)
      .sort((a, b) => b[1] - a[1])
      .map(([status, count]) => `${count} ${status.replaceAll("_", " ")}`);
    if (jobs.length) card("Jobs", String(jobs.length), told.join(", "));
    if (page.profiling) card("Measured", `${page.profiling.trials} trials`, `in ${duration(page.profiling.seconds)}; ${page.profiling.known} estimates were known before`);
    if (best) card("Best job", h("button", { type: "button", class: "name", onclick: () => choose(best.job) }, best.job), `${best.metric.replaceAll("_", " ")} ${number(best.value)}`);
    return cards;
  });
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
const askNow = poll({ ask: () => getPlan(ask.sweep), draw: hear, say, seconds: SECONDS });
