// What the page asks the server for.

const at = document.documentElement.dataset;
const part = encodeURIComponent;

export class Refused extends Error {}

async function get(path, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null));
  const answer = await fetch(`${at.root}/data/${path}${asked.size ? `?${asked}` : ""}`, {
    headers: { accept: "application/json" },
  });
  if (answer.ok) return answer.json();
  if (answer.status === 401) throw new Refused("Your login has ended. Load Airflow's page again to log in.");
  if (answer.status === 403) throw new Refused("You may not see the sweeps of this DAG.");
  if (answer.status === 404) throw new Refused((await answer.json()).detail);
  throw new Error(`Airflow answered with ${answer.status}`);
}

export const getPlan = (sweep) => get(`plan/${part(at.dag)}/${part(at.run)}`, { sweep });
export const getJob = (sweep, job) => get(`job/${part(at.dag)}/${part(at.run)}`, { sweep, job });
export const getSweeps = () => get(at.dag ? `sweeps/${part(at.dag)}` : "sweeps");

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
