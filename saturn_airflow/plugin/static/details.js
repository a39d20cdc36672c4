// All of one job: what was chosen for it and why, what it became.
import { colorOf, toneOf } from "./colors.js";
import { curveCharts } from "./curve.js";
import { fill, fillEach, h } from "./dom.js";
import { bytes, clock, devices, duration, number, percent, strategy } from "./format.js";
import { isWebAddress, logAddress } from "./links.js";

export class Details {
  constructor(element, onClose) {
    this.element = element;
    this.title = h("h2", { id: "details-title", tabindex: "-1" });
    this.status = h("span");
    this.reason = h("p", { class: "why bad" });
    this.facts = h("dl", { class: "facts" });
    this.links = h("nav", { "aria-label": "Of this job" });
    this.curves = h("div", { class: "curves" });
    this.rounds = h("div");
    this.rest = h("div");
    const close = h("button", { type: "button", class: "close", onclick: onClose, "aria-label": "Close the details" }, "×");
    element.append(h("header", { class: "toolbar" }, this.title, this.status, h("span", { class: "spring" }), close), this.reason, this.links, this.curves, this.facts, this.rounds, this.rest);
    element.addEventListener("keydown", (event) => event.key === "Escape" && onClose());
  }

  close() {
    this.element.hidden = true;
  }

  focus() {
    this.element.scrollTop = 0;
    this.title.focus();
  }

  // job: of the page; curves: its own; origin: what its seconds count from; known: what the server knows besides, a refusal in words, or null while it is asked.
  // What stays the same is not drawn again: the focus, the place and what was unfolded are left as they are.
  draw(job, known, curves, origin) {
    this.element.hidden = false;
    fill(this.title, job.name, () => job.name);
    fill(this.status, job.status, () => h("span", { class: `chip ${toneOf(job.status)}` }, job.status.replaceAll("_", " ")));
    this.reason.hidden = !job.reason;
    fill(this.reason, job.reason, () => job.reason);
    fillEach(this.facts, facts(job, origin), ([name, value, color]) => [h("dt", {}, name), h("dd", {}, color && h("span", { class: "swatch", color }), value)]);
    fill(this.curves, [curves ?? null, job.metrics ?? null], () => curveCharts(curves, job.metrics));
    fill(this.links, [job.task, job.mlflow], () => links(job));
    const { rounds, description } = known?.rounds ? known : { rounds: [] };
    fillEach(this.rounds, rounds, (round) => this.round(round));
    fill(this.rest, description ?? known, () =>
      description ? [h("h3", {}, "The job"), h("dl", { class: "facts" }, ...pairs(description))] : h("p", { class: "muted" }, known ?? "…"),
    );
  }

  round(round) {
    return [
      h("h3", {}, `Why ${strategy(round)}${round.round ? ` in round ${round.round}` : ""}`),
      round.moved_from && h("p", { class: "why" }, `Moved from ${round.moved_from}.`),
      ...(round.choice ? this.choice(round) : [h("p", { class: "muted" }, "Its alternatives were not recorded.")]),
      ...this.parameters(round.parameters),
    ];
  }

  choice({ choice }) {
    const chosen = choice.options.find((option) => option.chosen);
    const works = choice.options.filter((option) => option.seconds !== null && !option.reason);
    const not = [...choice.options.filter((option) => option.reason), ...(choice.refused ?? [])];
    const longest = Math.max(...works.map((option) => option.seconds));
    works.sort((a, b) => a.seconds - b.seconds);
    return [
      choice.why ? h("p", { class: "why" }, `${choice.why[0].toUpperCase()}${choice.why.slice(1)}.`) : "",
      chosen?.verdict ? h("p", { class: "why" }, `Its result next to one device: ${chosen.verdict}.`) : "",
      works.length
        ? h(
            "div",
            { class: "scroll" },
            h(
              "table",
              { class: "options" },
              h("thead", {}, h("tr", {}, ...["Strategy", "Takes", "Device-time", "Per device", "Known", "Result", "The plan"].map((name, index) => h("th", { scope: "col", class: index && index < 4 && "number" }, name)))),
              h("tbody", {}, ...works.map((option) => this.option(option, chosen, longest))),
            ),
          )
        : "",
      not.length
        ? h(
            "details",
            { open: !works.length },
            h("summary", {}, `${not.length} can't run`),
            h("ul", {}, ...not.map((option) => h("li", {}, h("strong", {}, strategy(option)), ` ${option.reason}`))),
          )
        : "",
    ];
  }

  option(option, chosen, longest) {
    const time = option.seconds * option.devices;
    const source = option.uncertainty ? `${option.source}, ±${percent(option.uncertainty)}` : option.source;
    return h(
      "tr",
      { class: option.chosen && "chosen" },
      h("th", { scope: "row" }, h("span", { class: "swatch", color: colorOf(option.technique) }), strategy(option), option.kind && option.kind !== chosen?.kind ? ` (${option.kind})` : ""),
      h("td", { class: "number bar", color: colorOf(option.technique), share: `${(100 * option.seconds) / longest}%` }, duration(option.seconds)),
      h("td", { class: "number" }, duration(time)),
      h("td", { class: "number" }, bytes(option.peak_device_bytes)),
      h("td", {}, source ?? ""),
      h("td", { title: option.verdict }, option.verdict?.split(":")[0] ?? ""),
      h("td", {}, option.chosen ? h("strong", {}, "chosen") : verdict(option, chosen)),
    );
  }

  parameters(parameters) {
    return Object.keys(parameters ?? {}).length ? [h("dl", { class: "facts" }, ...pairs(parameters))] : [];
  }
}

// What the page knows of a job, as lines of [name, value, color].
function facts(job, origin) {
  const from = (seconds) => `from ${duration(seconds)} on (${clock(origin + seconds, origin)})`;
  const bar = job.bars.at(-1);
  const lines = job.bars.map((one) => [job.bars.length > 1 ? `round ${one.round}` : "runs under", `${strategy(one)} on ${devices(one)}`, colorOf(one.technique)]);
  if (bar) lines.push(["planned", `${duration(job.planned)}, ${from(job.bars[0].planned_start)}`]);
  if (bar && job.actual !== null) lines.push(["actual", `${duration(job.actual)}, ${from(Math.max(0, job.start))}${bar.going ? ", goes on" : ""}`]);
  for (const [metric, value] of Object.entries(job.metrics ?? {})) {
    if (typeof value === "number") lines.push([metric.replaceAll("_", " "), number(value)]);
  }
  if (job.progress) lines.push(["progress", `step ${job.progress.step}${job.progress.total ? ` of ${job.progress.total}` : ""}, epoch ${job.progress.epoch + 1}${bar?.going && job.progress.samples_per_second ? `, ${number(job.progress.samples_per_second)} samples/s` : ""}`]);
  if (job.task) lines.push(["tries", String(job.task.try_number)]);
  return lines;
}

function links({ task, mlflow }) {
  return [
    task && h("a", { href: logAddress(task), "data-leave": true }, "Log"),
    task && h("a", { href: `${logAddress(task)}/details`, "data-leave": true }, "Airflow task"),
    isWebAddress(mlflow) && h("a", { href: mlflow, target: "_blank", rel: "noopener", "data-leave": true }, "MLflow run"),
  ];
}

// Why an alternative lost, in a few words.
function verdict(option, chosen) {
  if (!chosen) return "";
  const later = option.makespan && chosen.makespan ? option.makespan / chosen.makespan - 1 : null;
  if (later > 0.0005) return `would end ${percent(later, later < 0.1 ? 1 : 0)} later`;
  const time = (option.seconds * option.devices) / (chosen.seconds * chosen.devices) - 1;
  if (time > 0.0005) return `takes ${percent(time)} more device-time`;
  return option.seconds > chosen.seconds ? `takes ${percent(option.seconds / chosen.seconds - 1)} longer` : "no better for the plan";
}

function pairs(values, prefix = "") {
  return Object.entries(values).flatMap(([key, value]) =>
    value && typeof value === "object" && !Array.isArray(value)
      ? pairs(value, `${prefix}${key}.`)
      : [h("dt", {}, `${prefix}${key}`), h("dd", { class: "value" }, Array.isArray(value) ? value.join(", ") : String(value))],
  );
}
