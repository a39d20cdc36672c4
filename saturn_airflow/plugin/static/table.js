// The table of jobs: the chart in words, for reading, sorting and the keyboard.
import { colorOf, toneOf } from "./colors.js";
import { fill, h } from "./dom.js";
import { devices, duration, signed, strategy } from "./format.js";
import { isWebAddress, logAddress } from "./links.js";

const last = (job) => job.bars.at(-1);
// How far a job that has ended was from its plan, as a share; null where that says nothing.
function offBy(job) {
  return job.status === "finished" && job.actual ? job.actual / job.planned - 1 : null;
}

const SORTS = {
  name: (job) => job.name,
  status: (job) => job.status,
  strategy: (job) => (last(job) ? strategy(last(job)) : "~"),
  place: (job) => (last(job) ? [last(job).node, ...last(job).device_ids.map((id) => String(id).padStart(4, "0"))].join() : "~"),
  start: (job) => job.start ?? Infinity,
  planned: (job) => job.planned ?? Infinity,
  actual: (job) => job.actual ?? Infinity,
  off: (job) => offBy(job) ?? Infinity,
};

export class Table {
  constructor(element, onChoose) {
    this.body = element.tBodies[0];
    this.rows = new Map();
    this.sort = { by: "start", down: false };
    this.onChoose = onChoose;
    for (const head of element.querySelectorAll("th[data-sort]")) {
      head.firstElementChild.addEventListener("click", () => {
        const by = head.dataset.sort;
        this.sort = { by, down: this.sort.by === by && !this.sort.down };
        for (const other of element.querySelectorAll("th[data-sort]")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
        this.order();
      });
    }
  }

  draw(jobs, shown, chosen) {
    this.jobs = jobs;
    for (const job of jobs) {
      let row = this.rows.get(job.name);
      if (!row) {
        row = h("tr", {}, h("th", { scope: "row" }), ...Array.from({ length: 8 }, () => h("td")));
        for (const index of [4, 5, 6, 7]) row.cells[index].className = "number";
        this.rows.set(job.name, row);
      }
      this.write(row, job);
      row.hidden = !shown.has(job.name);
      row.classList.toggle("chosen", job.name === chosen);
    }
    for (const [name, row] of this.rows) {
      if (!jobs.some((job) => job.name === name)) {
        row.remove();
        this.rows.delete(name);
      }
    }
    this.order();
  }

  order() {
    const key = SORTS[this.sort.by];
    const sorted = [...this.jobs].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      return x < y ? -1 : x > y ? 1 : 0;
    });
    if (this.sort.down) sorted.reverse();
    const names = sorted.map((job) => job.name);
    if (names.join("\n") === this.shownOrder) return;
    this.shownOrder = names.join("\n");
    this.body.append(...names.map((name) => this.rows.get(name)));
  }

  write(row, job) {
    const bar = last(job);
    const [name, status, how, where, start, planned, actual, off, open] = row.cells;
    fill(name, [job.name, job.reason], () => [
      h("button", { type: "button", class: "name", onclick: () => this.onChoose(job.name) }, job.name),
      job.reason && h("p", { class: "reason" }, job.reason),
    ]);
    fill(status, job.status, () => h("span", { class: `chip ${toneOf(job.status)}` }, job.status.replaceAll("_", " ")));
    fill(how, job.bars.map(strategy), () => (bar ? this.strategies(job) : "–"));
    fill(where, job.bars.map(devices), () => (bar ? devices(bar) : "–"));
    fill(start, job.start, () => duration(bar && Math.max(0, job.start)));
    fill(planned, job.planned, () => duration(job.planned));
    fill(actual, job.actual, () => duration(job.actual));
    fill(off, offBy(job), () => signed(offBy(job)));
    fill(open, [job.task, job.mlflow], () => [
      job.task && h("a", { href: logAddress(job.task), "data-leave": true, "aria-label": `Log of ${job.name}` }, "Log"),
      job.task && h("a", { href: `${logAddress(job.task)}/details`, "data-leave": true, "aria-label": `Task of ${job.name}` }, "Task"),
      isWebAddress(job.mlflow) &&
        h("a", { href: job.mlflow, target: "_blank", rel: "noopener", "data-leave": true, "aria-label": `MLflow run of ${job.name}` }, "MLflow"),
    ]);
  }

  strategies(job) {
    const bar = last(job);
    const before = job.bars.slice(0, -1).filter((one, index) => strategy(one) !== strategy(job.bars[index + 1]) || devices(one) !== devices(job.bars[index + 1]));
    return [
      h("span", { class: "swatch", color: colorOf(bar.technique) }),
      strategy(bar),
      before.length ? h("span", { class: "muted" }, ` moved from ${before.map((one) => `${strategy(one)} on ${devices(one)}`).join(", ")}`) : null,
    ];
  }
}
