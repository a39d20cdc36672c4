// What the page asks the server for.

const at = document.documentElement.dataset;
const part = encodeURIComponent;

export class Refused extends Error {}

// What the server says; null where that is what it said with `tag`, and else under `tag` what to ask with next time.
async function get(path, query = {}, tag = null) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined));
  const answer = await fetch(`${at.root}/data/${path}${asked.size ? `?${asked}` : ""}`, {
    headers: { accept: "application/json", ...(tag ? { "if-none-match": tag } : {}) },
    cache: "no-store",
  });
  if (answer.status === 304) return null;
  if (answer.ok) return { ...(await answer.json()), tag: answer.headers.get("etag") };
  if (answer.status === 401) throw new Refused("Your login has ended. Load Airflow's page again to log in.");
  if (answer.status === 403) throw new Refused("You may not see the sweeps of this DAG.");
  if (answer.status === 404) throw new Refused((await answer.json()).detail);
  throw new Error(`Airflow answered with ${answer.status}`);
}

export const getPlan = (sweep, since, tag, run = at.run) => get(`plan/${part(at.dag)}/${part(run)}`, { since, sweep }, tag);
export const getJob = (sweep, job) => get(`job/${part(at.dag)}/${part(at.run)}`, { sweep, job });
export const getCluster = (tag) => get("cluster", {}, tag);
export const getSweeps = (limit, tag) => get(at.dag ? `sweeps/${part(at.dag)}` : "sweeps", { limit }, tag);

// Asks now and again, while somebody looks, and has the answer drawn, for as long as `draw` says that it is worth
// asking again. Whatever goes wrong is said. Returns how to ask at once: an answer that was under way is dropped then.
export function poll({ ask, draw, say, seconds }) {
  let timer = null;
  let calls = 0;
  async function now() {
    clearTimeout(timer);
    timer = null;
    const call = ++calls;
    const { answer, error } = await ask().then((answer) => ({ answer }), (error) => ({ error }));
    if (call !== calls) return;
    let goesOn = true;
    if (error instanceof Refused) {
      say(error.message);
      goesOn = false;
    } else if (error) {
      say(`No word from Airflow (${error.message}); trying again.`);
    } else {
      try {
        goesOn = draw(answer);
      } catch (mistake) {
        console.error(mistake);
        say(`This page can't show what Airflow answered (${mistake.message}). That is Saturn's mistake: please report it.`);
      }
    }
    if (goesOn) timer = setTimeout(now, 1000 * (document.hidden ? 10 * seconds : seconds));
  }
  document.addEventListener("visibilitychange", () => timer !== null && !document.hidden && now());
  now();
  return now;
}
