// The table of jobs: the chart in words, for reading, sorting and the keyboard.
import { colorOf, toneOf } from "./colors.js";
import { fill, h } from "./dom.js";
import { sparkline } from "./curve.js";
import { clock, devices, duration, number, percent, signed, strategy } from "./format.js";
import { isWebAddress, logAddress } from "./links.js";
import { shareOf, valueOf } from "./sweep.js";

const last = (job) => job.bars.at(-1);
// How far a job that has ended was from its plan, as a share; null where that says nothing.
function offBy(job) {
  return job.status === "finished" && job.actual ? job.actual / job.planned - 1 : null;
}

const SORTS = {
  name: (job) => job.name,
  status: (job) => [job.status, String(1 - (shareOf(job) ?? 0))].join(),
  strategy: (job) => (last(job) ? strategy(last(job)) : "~"),
  metric: (job, { metric }) => valueOf(job, metric) ?? (metric.mode === "max" ? -Infinity : Infinity),
  start: (job) => job.start ?? Infinity,
  planned: (job) => job.planned ?? Infinity,
  actual: (job) => job.actual ?? Infinity,
  off: (job) => offBy(job) ?? Infinity,
};

// The cells behind a job's name.
const CELLS = ["status", "metric number", "curve", "strategy", "start number", "planned number", "actual number", "off number", "open"];

export class Table {
  constructor(element, onChoose) {
    this.body = element.tBodies[0];
    this.rows = new Map();
    // Below each row one with the reason, which is as wide as the table.
    this.reasons = new Map();
    this.sort = { by: "start", down: false };
    this.onChoose = onChoose;
    for (const head of element.querySelectorAll("th[data-sort]")) {
      head.firstElementChild.addEventListener("click", () => {
        const by = head.dataset.sort;
        const first = by === "metric" && this.told.metric.mode === "max";
        this.sort = { by, down: this.sort.by === by ? !this.sort.down : first };
        for (const other of element.querySelectorAll("th[data-sort]")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
        this.order();
      });
    }
  }

  // told: the metric that counts, the curves and the best job by name, and the time.
  draw(jobs, shown, chosen, told) {
    Object.assign(this, { jobs, told });
    const head = this.body.parentElement.querySelector("[data-sort=metric] button");
    head.textContent = told.metric.metric.replaceAll("_", " ");
    for (const job of jobs) {
      let row = this.rows.get(job.name);
      if (!row) {
        row = h("tr", {}, h("th", { scope: "row" }), ...CELLS.map((name) => h("td", { class: name })));
        this.rows.set(job.name, row);
        this.reasons.set(job.name, h("tr", { class: "reasons" }, h("td", { colspan: CELLS.length + 1 })));
      }
      this.write(row, job);
      const reason = this.reasons.get(job.name);
      this.explain(reason.cells[0], job);
      row.hidden = !shown.has(job.name);
      reason.hidden = row.hidden || !job.reason;
      for (const one of [row, reason]) one.classList.toggle("chosen", job.name === chosen);
    }
    for (const [name, row] of this.rows) {
      if (!jobs.some((job) => job.name === name)) {
        row.remove();
        this.reasons.get(name).remove();
        this.rows.delete(name);
        this.reasons.delete(name);
      }
    }
    this.order();
  }

  order() {
    const key = SORTS[this.sort.by];
    const sorted = [...this.jobs].sort((a, b) => {
      const [x, y] = [key(a, this.told), key(b, this.told)];
      return x < y ? -1 : x > y ? 1 : 0;
    });
    if (this.sort.down) sorted.reverse();
    const names = sorted.map((job) => job.name);
    if (names.join("\n") === this.shownOrder) return;
    this.shownOrder = names.join("\n");
    this.body.append(...names.flatMap((name) => [this.rows.get(name), this.reasons.get(name)]));
  }

  write(row, job) {
    const bar = last(job);
    const { metric, curves, best, now, origin } = this.told;
    const [name, status, value, curve, how, start, planned, actual, off, open] = row.cells;
    fill(name, job.name, () => h("button", { type: "button", class: "name", onclick: () => this.onChoose(job.name) }, job.name));
    const left = job.progress?.ends === undefined || job.progress?.ends === null ? null : Math.max(0, job.progress.ends - now);
    const share = shareOf(job);
    fill(status, [job.status, share, left && duration(left)], () => [h("span", { class: `chip ${toneOf(job.status)}` }, job.status.replaceAll("_", " ")), share === null ? null : progress(job, share, left)]);
    const found = valueOf(job, metric);
    fill(value, [found, job.name === best], () => [job.name === best && h("span", { class: "best", title: "the best" }, "★ "), number(found)]);
    fill(curve, [curves[job.name], metric.metric, job.status === "pruned"], () => sparkline(curves[job.name], metric.metric) ?? "");
    fill(how, job.bars.map((one) => strategy(one) + devices(one)), () => (bar ? this.strategies(job) : "–"));
    fill(start, job.start, () => bar && h("span", { title: clock(origin + job.start, origin) }, duration(Math.max(0, job.start))));
    fill(planned, job.planned, () => duration(job.planned));
    fill(actual, duration(job.actual), () => duration(job.actual));
    fill(off, offBy(job), () => signed(offBy(job)));
    fill(open, [job.task, job.mlflow], () => [
      job.task && h("a", { href: logAddress(job.task), "data-leave": true, "aria-label": `Log of ${job.name}` }, "Log"),
      isWebAddress(job.mlflow) &&
        h("a", { href: job.mlflow, target: "_blank", rel: "noopener", "data-leave": true, "aria-label": `MLflow run of ${job.name}` }, "MLflow"),
    ]);
  }

  explain(cell, job) {
    fill(cell, job.reason, () => job.reason && h("p", { class: "reason", title: job.reason }, inShort(job.reason)));
  }

  strategies(job) {
    const bar = last(job);
    const before = job.bars.slice(0, -1).filter((one, index) => strategy(one) !== strategy(job.bars[index + 1]) || devices(one) !== devices(job.bars[index + 1]));
    const moves = before.map((one) => `${strategy(one)} on ${devices(one)}`).join(", ");
    return [
      h("span", { class: "swatch", color: colorOf(bar.technique) }),
      strategy(bar),
      h("p", { class: "place" }, devices(bar), before.length ? h("span", { title: `moved from ${moves}` }, ` moved${before.length > 1 ? ` ${before.length} times` : ""}`) : null),
    ];
  }
}

// Of a traceback, what was raised: its last line.
function inShort(reason) {
  if (!reason.includes("\n")) return reason;
  const lines = reason.trim().split("\n");
  return lines[0].startsWith("Traceback") ? lines.at(-1) : lines[0];
}

function progress(job, share, left) {
  const { step, total } = job.progress;
  const text = `${percent(share)}${!left ? "" : `, ${duration(left)} left`}`;
  return h("div", { class: `trained ${job.status === "running" ? "" : "ended"}`, title: `step ${step} of ${total}` }, h("span", { class: "meter", "aria-hidden": "true" }, h("span", { share: percent(share, 1).replace(" ", "") })), h("small", {}, text));
}
