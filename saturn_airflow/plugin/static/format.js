// Seconds, shares and bytes for people.

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const sign = seconds < 0 ? "−" : "";
  const s = Math.abs(seconds);
  if (s < 0.05) return "0 s";
  if (s < 9.95) return `${sign}${s.toFixed(1)} s`;
  if (s < 59.5) return `${sign}${Math.round(s)} s`;
  const whole = Math.round(s);
  const [days, hours] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600)];
  const [minutes, rest] = [Math.floor((whole % 3600) / 60), whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  if (days) return `${sign}${days} d ${two(hours)} h`;
  if (hours) return `${sign}${hours} h ${two(minutes)} m`;
  return `${sign}${minutes} m ${two(rest)} s`;
}

// A moment on the time axis: as few units as tell it apart from its neighbours.
export function moment(seconds) {
  const sign = seconds < 0 ? "−" : "";
  const s = Math.abs(seconds);
  if (s < 60) return `${sign}${+s.toFixed(1)} s`;
  const [hours, minutes, rest] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60), Math.round(s % 60)];
  if (hours) return minutes || rest ? `${sign}${hours} h ${minutes} m` : `${sign}${hours} h`;
  return rest ? `${sign}${minutes} m ${rest} s` : `${sign}${minutes} m`;
}

// Formats are made once: making one takes a hundred times as long as using it.
const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const DAY_AND_TIME = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

// The time of day where the viewer is, with the date where it is another day than that of `beside`.
export function clock(at, beside = Date.now() / 1000) {
  const [then, other] = [at, beside].map((seconds) => new Date(1000 * seconds));
  return (then.toDateString() === other.toDateString() ? TIME : DAY_AND_TIME).format(then);
}

export const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;

export const signed = (share) => (share === null ? "" : `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(0)} %`);

export function bytes(count) {
  if (!count) return "–";
  const gib = count / 2 ** 30;
  return gib >= 0.1 ? `${gib.toFixed(1)} GiB` : `${(count / 2 ** 20).toFixed(0)} MiB`;
}

export const number = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));

export const strategy = (bar) => `${bar.technique} × ${bar.devices}`;

export function devices(bar) {
  const runs = spans(bar.device_ids).map(([a, b]) => (a === b ? a : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  return `${bar.node} [${runs.join(", ")}]`;
}

// Contiguous runs of device ids, as [first, last].
export function spans(ids) {
  const found = [];
  for (const id of [...ids].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && last[1] === id - 1) last[1] = id;
    else found.push([id, id]);
  }
  return found;
}
