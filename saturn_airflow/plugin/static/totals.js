// The figures of a sweep at a glance.
import { h, fill } from "./dom.js";
import { clock, duration, number, percent, signed } from "./format.js";
import { bestOf, countsOf, inWords, metricOf, valueOf } from "./sweep.js";

// page: of the server; choose: called with the name of a job that is clicked.
export function drawTotals(element, page, choose) {
  const { totals, rounds, jobs, live } = page;
  const metric = metricOf(page);
  const best = page.best ?? (bestOf(jobs, metric) && { job: bestOf(jobs, metric).name, metric: metric.metric, value: valueOf(bestOf(jobs, metric), metric) });
  const counts = countsOf(jobs);
  const minute = live ? Math.floor(totals.elapsed ?? 0) : totals.elapsed;
  fill(element, [{ ...totals, elapsed: minute }, counts, best, live, rounds, page.champion, page.registered], () => {
    const cards = [];
    const card = (name, value, ...notes) => cards.push(h("div", {}, h("dt", {}, name), h("dd", {}, value), ...notes.filter(Boolean).map((note) => h("dd", { class: "note" }, note))));
    if (best) {
      const pick = h("button", { type: "button", class: "name", onclick: () => choose(best.job) }, best.job);
      card(page.best ? "Best job" : live ? "Leading so far" : "Best of what there is", pick, `${words(best.metric)} ${number(best.value)}`, registered(page.registered, page.champion));
    }
    if (page.champion) championCard(page.champion, card);
    if (jobs.length) {
      const ended = jobs.filter((job) => job.status === "finished").length;
      card("Jobs", ended ? `${ended} of ${jobs.length}` : String(jobs.length), inWords(counts));
    }
    if (rounds.length && page.rounds_most > 1) roundsCard(page, card);
    if (rounds.length) timeCards(page, card);
    if (page.profiling) {
      const known = page.profiling.known ? `; ${page.profiling.known} ${page.profiling.known === 1 ? "estimate was" : "estimates were"} known before` : "";
      card("Measured", `${page.profiling.trials} ${page.profiling.trials === 1 ? "trial" : "trials"}`, `in ${duration(page.profiling.seconds)}${known}`);
    }
    return cards;
  });
}

const words = (name) => name.replaceAll("_", " ");

// What it was measured against has a card of its own.
function registered(said, champion) {
  if (!said) return null;
  if (said.version && champion) return `${said.name} version ${said.version} @${said.alias}`;
  return said.version ? `${said.name} version ${said.version} @${said.alias}: ${said.reason}` : `not registered: ${said.reason}`;
}

// Tonight's best beside the champion, both on tonight's data.
function championCard(champion, card) {
  const { version, metric, value, beaten_by: by } = champion;
  const share = value && by ? ` ${percent(Math.abs(by / value), 1)} ${by > 0 ? "better than" : "worse than"}` : "";
  const name = by > 0 ? "Beats the champion by" : by < 0 ? "Behind the champion by" : "As good as the champion";
  card(name, number(Math.abs(by)), `${share} version ${version}, which has ${words(metric)} ${number(value)} on this sweep's data`.trim());
}

function roundsCard({ rounds, rounds_most: most, live }, card) {
  const told = rounds.map(({ number: round, makespan, rung, took }) => {
    const goal = rung === null ? "" : `, to epoch ${rung}`;
    return `${round}${goal}: ${duration(makespan)}${took === null ? "" : ` → ${duration(took)}`}`;
  });
  card(live ? "Round" : "Rounds", live ? `${rounds.length} of ${most}` : `${rounds.length}`, "planned → took", ...told.slice(-4));
}

// By when the last plan is done with which odds, as it was when it was made.
function promiseCard({ confidence, at, why, odds }, origin, card) {
  if (at !== null) card(`Done with ${percent(confidence)} by`, duration(at), `at ${clock(origin + at, origin)}`, odds === null ? null : `the deadline is kept with ${percent(odds)}`);
  else if (why) card("Done by", "not promised yet", why);
}

function timeCards({ totals, rounds, jobs, live, state, stages, rounds_most: most, origin }, card) {
  const compare = totals.is_comparable;
  const goesOn = live && totals.expected !== null;
  const isBetween = live && !goesOn && stages.some((stage) => ["plan", "train"].includes(stage.name) && stage.state === "running");
  const last = rounds.at(-1);
  const isLate = goesOn && totals.expected - totals.elapsed < 1;
  const end = last.rung === null ? "expected to end at" : `round ${last.number} ends at about`;
  // Where a job came to nothing, there is less to compare than was planned.
  const whole = jobs.every(({ status }) => ["finished", "not planned"].includes(status));
  const against = compare && whole && totals.elapsed !== null ? `${signed(totals.elapsed / totals.makespan - 1)} against the plan` : null;
  if (state === "cancelled") card("Stopped after", duration(totals.elapsed), compare || rounds.length === 1 ? `of ${duration(totals.makespan)} that were planned` : null);
  else if (goesOn) card("So far", duration(totals.elapsed), isLate ? "later than expected" : `${end} ${duration(totals.expected)}, ${clock(origin + totals.expected, origin)}`, last.rung !== null && rounds.length < most && "further rounds follow");
  else card(live ? "So far" : "Actual makespan", duration(totals.elapsed), isBetween ? "the next round is being planned" : live ? "all jobs have ended" : against, totals.elapsed !== null && `${clock(origin, origin)} – ${isBetween ? "now" : clock(origin + totals.elapsed, origin)}`);
  if ((goesOn || isBetween) && last.rung === null) promiseCard(totals.promise, origin, card);
  const saved = totals.current_practice && compare ? `${duration(totals.current_practice)} one after another on whole nodes` : null;
  const gap = totals.gap === null ? null : `gap ${percent(totals.gap, 1)}, bound ${duration(totals.lower_bound)}`;
  if (!rounds.some((round) => round.rung !== null)) {
    if (totals.value === null) card("Planned makespan", duration(totals.makespan), saved, gap);
    else card(`Planned ${totals.objective.replace("-", " ")}`, duration(totals.value), `makespan ${duration(totals.makespan)}`, totals.gap !== null && `gap ${percent(totals.gap, 1)}`);
  }
  const planned = compare || rounds.length === 1 ? `planned ${percent(totals.planned_utilisation)} of ${totals.devices} devices` : `of ${totals.devices} devices`;
  card("Devices busy", percent(totals.elapsed === null ? totals.planned_utilisation : totals.utilisation), planned);
}
