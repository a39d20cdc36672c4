// Jobs on devices over time: a row for each device, planned bars as outlines, actual ones solid.
import * as echarts from "./vendor/echarts-6.1.0.min.mjs";
import { colorOf, css, toneOf } from "./colors.js";
import { h } from "./dom.js";
import { clock, devices, duration, moment, percent, spans, strategy } from "./format.js";

const STEPS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const HATCH = { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [1, 5], rotation: -Math.PI / 4 };

const FAILED = "#d92d3a";

// ECharts keeps the texts that it draws as keys of plain objects, in which "__proto__" means another thing: an
// invisible character (U+2060) before them makes each a mere text.
const safe = (text) => `\u2060${text}`;

export class Chart {
  constructor(element, onChoose) {
    this.element = element;
    this.echarts = echarts.init(element, null, { renderer: "canvas" });
    this.echarts.on("click", "series", (event) => {
      const item = this.items[event.seriesId]?.[event.dataIndex];
      if (item) onChoose(item.job.name);
    });
    this.echarts.on("datazoom", () => {
      const [{ start, end }] = this.echarts.getOption().dataZoom;
      this.zoom = { start, end };
      this.echarts.setOption({ xAxis: this.ticks() });
    });
    this.items = { planned: [], actual: [] };
    this.zoom = { start: 0, end: 100 };
    new ResizeObserver(() => {
      const isSame = this.echarts.getWidth() === element.clientWidth && this.echarts.getHeight() === element.clientHeight;
      if (isSame) return;
      if (this.page) this.echarts.setOption({ xAxis: this.ticks() }, { lazyUpdate: true });
      this.echarts.resize();
    }).observe(element);
  }

  // page: what the server said; shown: which jobs to draw strongly; node: the only one to draw, or "".
  draw(page, { shown, node, layers, chosen }) {
    Object.assign(this, { page, shown, chosen });
    this.rows = page.nodes
      .filter((one) => !node || one.name === node)
      .flatMap((one) => Array.from({ length: one.devices }, (_, device) => ({ node: one.name, device, of: one.devices })));
    this.place = new Map(this.rows.map((row, index) => [`${row.node} ${row.device}`, index]));
    this.items = { planned: [], actual: [] };
    for (const job of page.jobs) {
      for (const bar of job.bars) {
        if (layers !== "actual" && bar.planned) this.add("planned", job, bar, bar.planned);
        if (layers !== "planned" && bar.actual) this.add("actual", job, bar, bar.actual);
      }
    }
    const height = Math.min(30, Math.max(3, Math.floor(640 / Math.max(1, this.rows.length))));
    this.rowHeight = height;
    this.element.style.height = `${height * this.rows.length + 96}px`;
    // Resizing draws what was set: both at once, since hundreds of jobs take a while to draw.
    this.echarts.setOption(this.option(layers), { replaceMerge: ["series"], lazyUpdate: true });
    this.echarts.resize();
  }

  add(kind, job, bar, [start, end]) {
    for (const [first, last] of spans(bar.device_ids)) {
      const top = this.place.get(`${bar.node} ${first}`);
      if (top === undefined) continue;
      this.items[kind].push({ value: [start, end, top, top + last - first], job, bar });
    }
  }

  option(layers) {
    const [ink, muted, line, face] = ["--ink", "--muted", "--line", "--card"].map(css);
    const firsts = new Set(this.rows.flatMap((row, index) => (row.device === 0 ? [index] : [])));
    const { rows } = this;
    const many = this.rowHeight < 14;
    const text = { color: muted, fontFamily: css("--font"), fontSize: 11 };
    return {
      animation: false,
      textStyle: { fontFamily: css("--font") },
      grid: { left: 8, right: 28, top: 24, bottom: 42, containLabel: true },
      tooltip: {
        trigger: "item",
        confine: true,
        className: "tip",
        backgroundColor: face,
        borderColor: line,
        padding: 10,
        textStyle: { color: ink, fontSize: 12 },
        formatter: (hit) => this.tip(this.items[hit.seriesId]?.[hit.dataIndex]),
      },
      dataZoom: [
        {
          type: "inside",
          xAxisIndex: 0,
          filterMode: "none",
          zoomOnMouseWheel: "ctrl",
          moveOnMouseMove: true,
          moveOnMouseWheel: "shift",
          preventDefaultMouseMove: false,
        },
      ],
      xAxis: {
        type: "value",
        position: "top",
        ...this.ticks(),
        max: this.horizon(),
        axisLabel: { ...text, formatter: (seconds) => `${moment(seconds)}\n${this.clock(seconds)}`, lineHeight: 13, hideOverlap: true, showMaxLabel: false },
        axisLine: { show: false },
        axisTick: { show: true, lineStyle: { color: line } },
        splitLine: { lineStyle: { color: line } },
      },
      yAxis: {
        type: "category",
        inverse: true,
        data: this.rows.map((row) => `${row.node} ${row.device}`),
        axisLine: { show: false },
        axisTick: { show: false },
        axisLabel: {
          ...text,
          interval: (index) => !many || rows[index].device === Math.floor((rows[index].of - 1) / 2),
          formatter: (_, index) => safe(many ? rows[index].node : this.rowLabel(rows[index])),
        },
        splitLine: { show: true, interval: (index) => firsts.has(index), lineStyle: { color: css("--line-strong") } },
      },
      series: ["planned", "actual"].map((kind) => ({
        id: kind,
        type: "custom",
        clip: true,
        z: kind === "planned" ? 2 : 3,
        encode: { x: [0, 1], y: [2, 3] },
        data: this.items[kind].map((item) => item.value),
        renderItem: (params, api) => this.bar(kind, this.items[kind][params.dataIndex], params, api, layers),
        ...(kind === "actual" ? { markLine: this.lines(ink, muted) } : {}),
      })),
    };
  }

  rowLabel(row) {
    return row.of > 1 ? `${row.node} · ${row.device}` : row.node;
  }

  bar(kind, item, params, api, layers) {
    const [start, end, top, bottom] = item.value;
    const [x, y] = api.coord([start, top]);
    const [right, under] = api.coord([end, bottom]);
    const row = api.size([0, 1])[1];
    const inset = row < 8 ? 0.3 : kind === "actual" && layers === "both" ? 4 : 1.5;
    const shape = echarts.graphic.clipRectByRect(
      { x, y: y - row / 2 + inset, width: Math.max(right - x, 1.5), height: under - y + row - 2 * inset },
      params.coordSys,
    );
    if (!shape) return undefined;
    const color = colorOf(item.job.group ?? item.bar.technique);
    const seen = this.shown.has(item.job.name);
    const chosen = item.job.name === this.chosen;
    const opacity = seen ? 1 : 0.13;
    const failed = kind === "actual" && toneOf(item.bar.status) === "bad";
    const isDropped = toneOf(item.job.status) === "pruned";
    const style =
      kind === "planned"
        ? {
            fill: echarts.color.modifyAlpha(color, 0.14),
            stroke: chosen ? css("--ink") : color,
            lineWidth: chosen ? 2 : 1,
            ...(shape.height > 7 ? { decal: { ...HATCH, color: echarts.color.modifyAlpha(color, 0.35) } } : {}),
            opacity,
          }
        : {
            fill: isDropped ? echarts.color.modifyAlpha(color, 0.45) : color,
            stroke: chosen ? css("--ink") : failed ? FAILED : css("--card"),
            lineWidth: chosen || failed ? 2 : row < 8 ? 0 : 1,
            ...(failed ? { decal: { ...HATCH, dashArrayY: [3, 5], color: FAILED } } : {}),
            opacity,
          };
    const covered = kind === "planned" && layers === "both" && item.bar.actual;
    // Left of now, what runs there may lie over what is late.
    const past = kind === "planned" && layers === "both" && this.page.live ? Math.max(0, api.coord([this.page.now, top])[0] - shape.x) : 0;
    const labelled = seen && !covered && shape.height >= 11 && shape.width - past > 34;
    return {
      type: "rect",
      shape: { ...shape, r: row < 8 ? 0 : 3 },
      style,
      ...(labelled ? this.label(item, kind, shape, past) : {}),
    };
  }

  label(item, kind, shape, past) {
    return {
      textConfig: { position: "insideLeft", distance: 6 + past },
      textContent: {
        type: "text",
        silent: true,
        style: {
          text: safe(item.job.name),
          fill: kind === "planned" ? css("--ink") : "#fff",
          ...(kind === "planned" ? {} : { textShadowColor: "#0008", textShadowBlur: 3 }),
          fontSize: Math.min(12, Math.max(9, shape.height - 3)),
          fontFamily: css("--font"),
          fontWeight: 500,
          width: shape.width - past - 10,
          overflow: "truncate",
          ellipsis: "…",
        },
      },
    };
  }

  lines(ink, muted) {
    const { totals, live, now, rounds } = this.page;
    const at = (xAxis, name, type, color, lower) => ({
      xAxis,
      lineStyle: { type, color, width: name === "now" ? 2 : 1.2 },
      label: {
        formatter: name,
        color,
        position: name === "now" ? "start" : "end",
        align: xAxis > 0.85 * this.horizon() ? "right" : "center",
        distance: name === "now" ? 40 : lower ? 22 : 6,
        fontSize: 11,
        fontFamily: css("--font"),
        backgroundColor: css("--card"),
        padding: [1, 3],
      },
    });
    const found = [];
    if (this.page.is_cluster) return { symbol: "none", silent: true, animation: false, data: [at(now, "now", "solid", css("--accent"), false)] };
    if (!rounds.length) return { data: [] };
    const last = rounds.at(-1);
    if (totals.deadline) found.push(at(totals.deadline.at, "deadline", "solid", css("--bad"), true));
    if (rounds.length === 1 && totals.value === null) {
      found.push(at(totals.lower_bound, `proven bound ${duration(totals.lower_bound)}`, "dotted", muted, true));
    }
    const name = last.rung === null ? "planned end" : `round ${last.number}, planned to`;
    found.push(at(last.start + last.makespan, `${name} ${duration(last.start + last.makespan)}`, "dashed", ink, rounds.length > 1));
    if (live && now >= 0) found.push(at(now, "now", "solid", css("--accent"), false));
    for (const round of rounds.slice(1)) found.push(at(round.start, `round ${round.number}`, "solid", muted, false));
    return { symbol: "none", silent: true, animation: false, data: [...found, ...this.moves(ink)] };
  }

  // Where the chosen job went from round to round.
  moves(color) {
    const job = this.page.jobs.find((one) => one.name === this.chosen);
    const ends = (bar) => bar.actual ?? bar.planned;
    const row = (bar) => this.place.get(`${bar.node} ${bar.device_ids[0]}`);
    const bars = (job?.bars ?? []).filter((bar) => ends(bar) && row(bar) !== undefined);
    const place = (bar) => strategy(bar) + devices(bar);
    const steps = bars.slice(1).map((bar, index) => [bars[index], bar]);
    return steps
      .filter(([from, to]) => place(from) !== place(to))
      .map(([from, to]) => [
        { coord: [ends(from)[1], row(from)], symbol: "circle", symbolSize: 5, lineStyle: { color, type: "solid", width: 1.5 }, label: { show: false } },
        { coord: [ends(to)[0], row(to)], symbol: "arrow", symbolSize: 9 },
      ]);
  }

  earliest() {
    return Math.min(0, ...this.items.actual.map((item) => item.value[0]));
  }

  horizon() {
    const { totals, rounds, live, now } = this.page;
    const ends = [1];
    for (const job of this.page.jobs) {
      for (const bar of job.bars) ends.push(bar.planned?.[1] ?? 0, bar.actual?.[1] ?? 0, bar.expected_end ?? 0);
    }
    if (live && rounds.length) ends.push(now);
    return Math.max(...ends, totals.lower_bound ?? 0, totals.deadline?.at ?? 0) * 1.02;
  }

  // Ticks at whole seconds, minutes and hours, as many as there is room for.
  ticks() {
    const { start, end } = this.zoom;
    const range = ((this.horizon() - this.earliest()) * (end - start)) / 100;
    const room = Math.max(2, Math.floor(this.element.clientWidth / 90));
    const interval = STEPS.find((step) => range / step <= room) ?? 86400 * Math.ceil(range / 86400 / room);
    return { interval, min: Math.floor(this.earliest() / interval) * interval };
  }

  // Zooms around the middle of what is seen; shifts by a share of it.
  view(factor, shift = 0) {
    const { start, end } = this.zoom;
    const half = Math.min(50, ((end - start) / 2) * factor);
    const middle = Math.min(100 - half, Math.max(half, (start + end) / 2 + shift * (end - start)));
    this.echarts.dispatchAction({ type: "dataZoom", start: middle - half, end: middle + half });
  }

  showAll() {
    this.echarts.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
  }

  clock(seconds) {
    const zero = this.page.origin ?? this.page.at;
    return clock(zero + seconds, zero);
  }

  when(start, end, goesOn = false) {
    return `from ${moment(Math.round(start))}, ${duration(end - start)} (${this.clock(start)} – ${goesOn ? "now" : this.clock(end)})`;
  }

  tip(item) {
    if (!item) return "";
    const { job, bar } = item;
    const line = (name, value) => (value ? [h("dt", {}, name), h("dd", {}, value)] : []);
    return h(
      "div",
      {},
      h("strong", {}, job.name),
      h(
        "dl",
        {},
        ...line("status", bar.status.replaceAll("_", " ")),
        ...line("strategy", strategy(bar)),
        ...line("devices", devices(bar)),
        ...line("planned", this.when(bar.planned_start, bar.planned_start + bar.planned_seconds)),
        ...line("actual", bar.actual && this.when(...bar.actual, bar.going)),
        ...line(`done with ${percent(job.odds ?? 0)} by`, this.page.live && Number.isFinite(job.by) && this.clock(job.by)),
        ...line("round", this.page.rounds.length > 1 && String(bar.round)),
        ...line("reason", job.reason && job.reason.slice(0, 300)),
      ),
    );
  }
}
