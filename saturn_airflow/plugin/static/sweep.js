// What is reckoned from what the server says of a sweep; nothing here touches the page.

// The sweep as it will be so many seconds later if nothing happens.
export function advanced(page, seconds) {
  if (!page.live) return page;
  const now = page.now + seconds;
  const bars = (job) =>
    job.bars.map((bar) => ({
      ...bar,
      actual: bar.going && bar.actual ? [bar.actual[0], Math.max(now, bar.actual[0])] : bar.actual,
      expected_end: bar.expected_end === null ? null : Math.max(bar.expected_end, now),
    }));
  const jobs = page.jobs.map((job) => (job.bars.some((bar) => bar.going) ? { ...job, bars: bars(job), actual: job.actual + seconds } : job));
  const { totals } = page;
  const grown = totals.goes_on && totals.elapsed !== null ? { elapsed: totals.elapsed + seconds, expected: totals.expected === null ? null : Math.max(totals.expected, now) } : {};
  return { ...page, now, jobs, totals: { ...totals, ...grown } };
}

// By what jobs are compared: what the sweep was told, else as its report will.
export function metricOf({ compared_by, jobs }) {
  if (compared_by.metric) return compared_by;
  const has = (name) => jobs.some((job) => job.metrics?.[name] !== undefined);
  return { ...compared_by, metric: ["eval_loss", "epoch_loss"].find(has) ?? "loss" };
}

export const valueOf = (job, { metric }) => (typeof job.metrics?.[metric] === "number" ? job.metrics[metric] : null);

// Of the jobs that have finished or train, the best by now.
export function bestOf(jobs, metric) {
  const known = jobs.filter((job) => ["finished", "running", "paused", "going_on"].includes(job.status) && valueOf(job, metric) !== null);
  const better = (a, b) => (metric.mode === "max" ? valueOf(a, metric) > valueOf(b, metric) : valueOf(a, metric) < valueOf(b, metric));
  return known.reduce((best, job) => (best === null || better(job, best) ? job : best), null);
}

// How many jobs have which status, the commonest first.
export function countsOf(jobs) {
  const counts = {};
  for (const job of jobs) counts[job.status] = (counts[job.status] ?? 0) + 1;
  return Object.entries(counts).sort((a, b) => b[1] - a[1]);
}

export const inWords = (counts) => counts.map(([status, count]) => `${count} ${status.replaceAll("_", " ")}`).join(", ");

// The share of its steps that a job has trained; null where that is not known.
export function shareOf({ progress, status }) {
  if (!progress?.total || status === "finished") return null;
  return Math.min(1, progress.step / progress.total);
}
