// A color for each technique, the same in every sweep: those that come with Saturn have their own.

const OWN = {
  single: "#3f6bbb",
  ddp: "#cf6a1f",
  fsdp: "#21866a",
  tensor: "#9a5fb8",
  pipeline: "#a8841a",
  spill: "#7c5f4e",
};
const OTHERS = ["#c04f79", "#2b8a9b", "#6c8631", "#6064c4", "#a54c36", "#4d7d7d"];

const others = new Map();

export function colorOf(technique) {
  if (OWN[technique]) return OWN[technique];
  if (!others.has(technique)) others.set(technique, OTHERS[others.size % OTHERS.length]);
  return others.get(technique);
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const STATUS = {
  finished: "good",
  success: "good",
  done: "good",
  running: "going",
  retrying: "going",
  going_on: "going",
  paused: "waiting",
  "waiting for devices": "waiting",
  waiting: "waiting",
  queued: "waiting",
  "not run": "waiting",
  skipped: "waiting",
  pruned: "pruned",
  stopped: "pruned",
  cancelled: "pruned",
};

export const toneOf = (status) => STATUS[status] ?? "bad";
