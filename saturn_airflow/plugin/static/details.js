// All of one job: what was chosen for it and why, what it became.
import { colorOf, toneOf } from "./colors.js";
import { h } from "./dom.js";
import { bytes, devices, duration, number, percent, strategy } from "./format.js";
import { isWebAddress, logAddress } from "./links.js";

export class Details {
  constructor(element, onClose) {
    this.element = element;
    this.onClose = onClose;
    element.addEventListener("keydown", (event) => event.key === "Escape" && onClose());
  }

  close() {
    this.element.hidden = true;
    this.element.replaceChildren();
  }

  // job: of the page; known: what the server knows besides, a refusal in words, or null while it is asked.
  draw(job, known) {
    const had = this.element.contains(document.activeElement) ? document.activeElement : null;
    this.element.hidden = false;
    this.element.replaceChildren(
      h(
        "header",
        { class: "toolbar" },
        h("h2", { id: "details-title", tabindex: "-1" }, job.name),
        h("span", { class: `chip ${toneOf(job.status)}` }, job.status.replaceAll("_", " ")),
        h("span", { class: "spring" }),
        h("button", { type: "button", class: "close", onclick: this.onClose, "aria-label": "Close the details" }, "×"),
      ),
      job.reason ? h("p", { class: "why bad" }, job.reason) : "",
      this.facts(job),
      ...(typeof known === "string" ? [h("p", { class: "muted" }, known)] : known ? this.known(known) : [h("p", { class: "muted" }, "…")]),
    );
    if (had) (had.className ? this.element.querySelector(`.${had.className}`) : this.element.querySelector("h2"))?.focus();
  }

  focus() {
    this.element.querySelector("h2")?.focus();
  }

  facts(job) {
    const line = (name, ...value) => (value.some(Boolean) ? [h("dt", {}, name), h("dd", {}, ...value)] : []);
    const bar = job.bars.at(-1);
    return h(
      "dl",
      { class: "facts" },
      ...job.bars.flatMap((one) =>
        line(job.bars.length > 1 ? `round ${one.round}` : "runs under", h("span", { class: "swatch", color: colorOf(one.technique) }), `${strategy(one)} on ${devices(one)}`),
      ),
      ...(bar ? line("planned", `${duration(job.planned)}, from ${duration(job.bars[0].planned_start)} on`) : []),
      ...(job.actual !== null && bar ? line("actual", `${duration(job.actual)}, from ${duration(Math.max(0, job.start))} on${bar.going ? ", goes on" : ""}`) : []),
      ...line("eval loss", job.eval_loss !== null && job.eval_loss !== undefined && number(job.eval_loss)),
      ...line("loss", job.loss !== null && job.loss !== undefined && number(job.loss)),
      ...(job.task ? line("tries", String(job.task.try_number)) : []),
      ...(job.task
        ? line(
            "open",
            h("a", { href: logAddress(job.task), "data-leave": true }, "log"),
            " ",
            h("a", { href: `${logAddress(job.task)}/details`, "data-leave": true }, "Airflow task"),
            " ",
            isWebAddress(job.mlflow) ? h("a", { href: job.mlflow, target: "_blank", rel: "noopener", "data-leave": true }, "MLflow run") : "",
          )
        : []),
    );
  }

  known({ rounds, description }) {
    return [
      ...rounds.flatMap((round, index) => [
        h("h3", {}, rounds.length > 1 ? `Why ${strategy(round)} in round ${index + 1}` : `Why ${strategy(round)}`),
        ...(round.choice ? this.choice(round) : [h("p", { class: "muted" }, "Its alternatives were not recorded.")]),
        ...this.parameters(round.parameters),
      ]),
      h("h3", {}, "The job"),
      h("dl", { class: "facts" }, ...pairs(description)),
    ];
  }

  choice({ choice, seconds }) {
    const chosen = choice.options.find((option) => option.chosen);
    const works = choice.options.filter((option) => option.seconds !== null && !option.reason);
    const not = [...choice.options.filter((option) => option.reason), ...(choice.refused ?? [])];
    const longest = Math.max(...works.map((option) => option.seconds));
    works.sort((a, b) => a.seconds - b.seconds);
    return [
      choice.why ? h("p", { class: "why" }, `${choice.why[0].toUpperCase()}${choice.why.slice(1)}.`) : "",
      works.length
        ? h(
            "div",
            { class: "scroll" },
            h(
              "table",
              { class: "options" },
              h("thead", {}, h("tr", {}, ...["Strategy", "Takes", "Device-time", "Per device", "Known", "The plan"].map((name, index) => h("th", { scope: "col", class: index && index < 4 && "number" }, name)))),
              h("tbody", {}, ...works.map((option) => this.option(option, chosen, longest, seconds))),
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
      h("td", {}, option.chosen ? h("strong", {}, "chosen") : verdict(option, chosen)),
    );
  }

  parameters(parameters) {
    return Object.keys(parameters ?? {}).length ? [h("dl", { class: "facts" }, ...pairs(parameters))] : [];
  }
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
