// Links out of the frame. Airflow's frame may neither navigate its parent nor open windows, but its document is of
// the same origin: a link that is clicked there does both.

const at = document.documentElement.dataset;
const part = encodeURIComponent;

export const runAddress = (dag = at.dag, run = at.run) => `${at.airflow}/dags/${part(dag)}/runs/${part(run)}`;

export const planAddress = (dag, run, sweep) => `${at.root}/plan/${part(dag)}/${part(run)}?sweep=${part(sweep)}`;

export const compareAddress = (dag, sweep, before, after) =>
  `${at.root}/compare/${part(dag)}?${new URLSearchParams(Object.entries({ sweep, before, after }).filter(([, value]) => value))}`;

// A task's page opens with its log, that of all mapped instances (a map index of null) with their list.
export function logAddress(task) {
  const mapped = task.map_index === null ? "/mapped" : task.map_index >= 0 ? `/mapped/${task.map_index}` : "";
  return `${runAddress()}/tasks/${part(task.id)}${mapped}`;
}

export const isWebAddress = (url) => typeof url === "string" && /^https?:\/\//.test(url);

function leave(event) {
  const link = event.target.closest?.("a[data-leave]");
  if (!link || window.parent === window) return;
  let outer;
  try {
    outer = window.parent.document;
  } catch {
    return; // framed by another origin: the link does what it can
  }
  event.preventDefault();
  const another = outer.createElement("a");
  another.href = link.href;
  another.rel = "noopener";
  if (link.target === "_blank" || event.ctrlKey || event.metaKey || event.shiftKey || event.button === 1) {
    another.target = "_blank";
  }
  outer.body.append(another);
  another.click();
  another.remove();
}

document.addEventListener("click", leave);
document.addEventListener("auxclick", (event) => event.button === 1 && leave(event));
