// The list of the latest sweeps.
import { toneOf } from "./colors.js";
import { getSweeps, poll } from "./data.js";
import { byId, fill, h, say } from "./dom.js";
import { duration, number, percent } from "./format.js";
import { planAddress } from "./links.js";

const SECONDS = 10;
const GOOD = ["success"];
const BAD = ["failed", "upstream_failed"];

function row(sweep) {
  const { jobs } = sweep;
  const all = Object.values(jobs).reduce((sum, count) => sum + count, 0);
  const count = (states) => states.reduce((sum, state) => sum + (jobs[state] ?? 0), 0);
  const [good, bad] = [count(GOOD), count(BAD)];
  return h(
    "tr",
    {},
    h(
      "th",
      { scope: "row" },
      h("a", { href: planAddress(sweep.dag_id, sweep.run_id, sweep.sweep) }, `${sweep.dag_id} · ${sweep.sweep}`),
      h("p", { class: "reason" }, sweep.run_id),
    ),
    h("td", {}, h("span", { class: `chip ${toneOf(sweep.state)}` }, sweep.state)),
    h("td", {}, sweep.start ? new Date(1000 * sweep.start).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "–"),
    h(
      "td",
      { class: "wide" },
      all
        ? h(
            "span",
            { class: "progress", title: `${good} of ${all} finished${bad ? `, ${bad} failed` : ""}` },
            h("span", { class: "good", share: `${(100 * good) / all}%` }),
            h("span", { class: "bad", share: `${(100 * bad) / all}%` }),
          )
        : "",
      all ? `${good}/${all}${bad ? `, ${bad} failed` : ""}` : "–",
    ),
    h("td", { class: "number" }, duration(sweep.makespan)),
    h("td", { class: "number" }, percent(sweep.gap, 1)),
    h("td", { class: "number" }, duration(sweep.actual_seconds)),
    h("td", { class: "number" }, percent(sweep.utilisation)),
    h("td", {}, sweep.best ? `${sweep.best.job} (${sweep.best.metric.replaceAll("_", " ")} ${number(sweep.best.value)})` : "–"),
  );
}

function draw({ sweeps }) {
  say(sweeps.length ? "" : "There is no sweep yet. A DAG with a SaturnSweepOperator makes one each time it runs.");
  byId("sweeps").hidden = !sweeps.length;
  fill(byId("sweeps").tBodies[0], sweeps, () => sweeps.map(row));
  return true;
}

poll({ ask: getSweeps, draw, say, seconds: SECONDS });
