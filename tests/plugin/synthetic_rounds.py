"""A sweep with rounds and successive halving, written into Airflow's database without running it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from synthetic import Sweep, progress

from saturn_airflow.model.plan import Assignment, Plan

EPOCH = 60


class Halving(Sweep):
    """Jobs of which after 1 and 2 epochs the better half goes on, to 4 epochs.

    :param at: seconds since the first round's plan; None when it has ended.
    """

    def _tasks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        tasks: list[dict[str, Any]] = []
        xcoms: list[dict[str, Any]] = []
        now = float("inf") if self.at is None else self.at

        def task(
            task_id: Any,
            operator: Any,
            state: Any,
            index: int = -1,
            start: Any = None,
            end: Any = None,
            name: Any = None,
            **pushed: Any,
        ) -> None:
            tasks.append(self._row(task_id, operator, state, index, start, end, name))
            common = {"task_id": f"sweep.{task_id}", "map_index": index}
            xcoms.extend({**common, "key": key, "value": value} for key, value in pushed.items())

        jobs = [
            {
                "name": n,
                "load_model": "shop.models:vit",
                "hparams": {"lr": 1e-3},
                "metrics": {"accuracy": "m:a"},
            }
            for n in self.names
        ]
        task("trials", "Trials", "success", start=-30, end=-28, jobs=jobs, sweep={"name": "x"}, attempt=1.0)
        for index in range(4):
            task("profile.wave_1", "Profile", "success", index, -28, -5, name=f"{self.names[index]} ddp x 2")
        trained: dict[str, Any] = {}
        outcomes: dict[str, dict[str, Any]] = {}
        left, began, of_round = list(self.names), 0.0, 0
        for number, (epochs, upto) in enumerate(((1, 1), (1, 2), (2, 4)), 1):
            dropped: list[str] = []
            prefix = f"round_{number}."
            if began > now or not left:
                task(f"{prefix}plan", "RoundPlan", None)
                continue
            of_round = number
            if number > 1:
                ranked = sorted(left, key=lambda job: outcomes[job]["eval_loss"])
                keep = ranked[: (len(ranked) + 1) // 2]
                dropped, left = [job for job in left if job not in keep], keep
            last = number == 3
            assignments, free = [], [0.0] * self.devices
            for job in left:
                device = min(range(self.devices), key=lambda d: free[d])
                seconds = 40.0 * epochs * (0.7 + 0.1 * (len(job) % 7))
                ids, start = (device,), free[device]
                assignments.append(Assignment(job, "single", 1, "gpu-00", ids, start, start + seconds))
                free[device] += seconds
            makespan = max(free)
            plan = Plan(self.dag_id, "makespan", makespan, 0.95 * makespan, 1.0, tuple(assignments))
            made = self.made + began
            nodes = [{"name": "gpu-00", "devices": self.devices, "kind": "h100", "queue": "q"}]
            values = {
                **plan.to_dict(),
                "nodes": nodes,
                "current_practice": 900.0,
                "not_planned": 0,
                "jobs": len(self.names),
            }
            values |= {"rung": None if last else upto, "compared_by": {"metric": None, "mode": "min"}}
            told: dict[str, Any] = {
                "plan": values,
                "attempt": made,
                "unplanned": [],
                "return_value": [],
                "choices": {},
            }
            if number == 1:
                told["profiling"] = {"trials": 4, "known": 2, "seconds": 23.0}
            task(f"{prefix}plan", "RoundPlan", "success", start=began - 3, end=began, **told)
            ends = [began]
            for index, a in enumerate(assignments):
                started = trained.get(a.job, (made + a.start, 0.0))[0]
                begin, end = began + a.start * 1.08, began + a.end * 1.1
                share = upto / 4 * min(1.0, (now - begin) / (end - begin))
                if begin > now:
                    task(f"{prefix}train", "RoundTrain", None, index)
                    continue
                before = (upto - epochs) / 4
                share = before + (min(1.0, (now - begin) / (end - begin))) * (upto / 4 - before)
                said = progress(a.job, made, share, started, (end - begin) / epochs * 4, total=4 * EPOCH)
                said["now"] |= {"stops_at": None if last else upto * EPOCH, "time": self.made + min(now, end)}
                if end > now:
                    task(f"{prefix}train", "RoundTrain", "running", index, begin, name=a.job, progress=said)
                    ends.append(float("inf"))
                    continue
                held = trained.get(a.job, (0, 0.0))[1] + end - begin
                trained[a.job] = (started, held)
                outcomes[a.job] = {
                    "job": a.job,
                    "attempt": made,
                    "status": "finished" if last else "paused",
                    "reason": None,
                    "started_at": started,
                    "ended_at": self.made + end,
                    "actual_seconds": held,
                    "planned_seconds": a.seconds,
                    "loss": said["now"]["loss"],
                    "eval_loss": said["now"]["metrics"]["eval_loss"],
                }
                pushed = {"outcome": outcomes[a.job], "progress": said}
                task(f"{prefix}train", "RoundTrain", "success", index, begin, end, a.job, **pushed)
                ends.append(end)
            for index, job in enumerate(dropped, len(assignments)):
                value = outcomes[job]["eval_loss"]
                kept = sorted(outcomes[other]["eval_loss"] for other in left)
                why = f"eval_loss {value:.4g} after {upto // 2} epochs; those that stay had {kept[0]:.4g} to "
                why += (
                    f"{kept[-1]:.4g} by then: pruned after {upto // 2 * EPOCH} batches, before round {number}"
                )
                fate = {"job": job, "attempt": made, "status": "pruned", "reason": why}
                task(f"{prefix}train", "RoundTrain", "skipped", index, name=job, outcome=fate)
                outcomes[job] = {**outcomes[job], **fate}
            began = max(ends) + 4
        if now == float("inf"):
            best = min(
                (o for o in outcomes.values() if o["status"] == "finished"), key=lambda o: o["eval_loss"]
            )
            result: dict[str, Any] = {
                "best": {"job": best["job"], "metric": "eval_loss", "value": best["eval_loss"]}
            }
            result |= {"jobs": list(outcomes.values()), "actual_seconds": began, "utilisation": 0.8}
            fates = {name: o["status"] for name, o in outcomes.items()}
            result |= {"failed": [], "pruned": [name for name, fate in fates.items() if fate == "pruned"]}
            result |= {"rounds": of_round, "without_selection_seconds": 700.0}
            task("report", "RoundReport", "success", start=began, end=began + 1, return_value=result)
        else:
            task("report", "RoundReport", None)
        return tasks, xcoms

    def _row(
        self, task_id: Any, operator: Any, state: Any, index: Any, start: Any, end: Any, name: Any
    ) -> dict[str, Any]:
        return {
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "task_id": f"sweep.{task_id}",
            "map_index": index,
            "operator": f"{operator}Operator",
            "state": state,
            "start_date": None if start is None else self.began + timedelta(seconds=start),
            "end_date": None if end is None else self.began + timedelta(seconds=end),
            "try_number": 1,
            "pool": "default_pool",
            "_rendered_map_index": name,
        }
