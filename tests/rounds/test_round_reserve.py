"""The round in reserve: who has it skipped when no node was lost, and what it does when one was."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.deciding.next_round import SweepState
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.launch.progress import Progress
from saturn_airflow.launch.runs import RunSpec
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.sharing import SharedJob, SharedSweep
from saturn_airflow.operators import inventory, plan_task, round_reserve, round_train, round_watch
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.others import OTHERS_KEY
from saturn_airflow.operators.plan_task import PlanOperator
from saturn_airflow.operators.retrying import TryAgainError
from saturn_airflow.operators.round_reserve import skip_watch_after_last
from saturn_airflow.operators.round_watch import RoundWatchOperator, over_file
from saturn_airflow.operators.train_task import TrainOperator

A, B = Node("gpu-a", 2, "cpu"), Node("gpu-b", 2, "cpu")
TWO = Cluster(A, B)
ON_A, ON_B = "sweep.train.gpu-a", "sweep.train.gpu-b"
IN_RESERVE = ["sweep.round_2.plan", "sweep.round_2.train.gpu-a"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    return tmp_path


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Airflow was told to skip."""
    told: list[list[str]] = []
    monkeypatch.setattr(round_reserve, "skip_tasks", lambda tasks: told.append(list(tasks)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return told


def context(*states: dict[str, str | None], outcomes: dict[int, str] | None = None) -> Any:
    """That of the first job on gpu-a; Airflow answers with ``states``, one after another."""
    answers = list(states)

    def count(task_ids: list[str], states: list[str], **_: Any) -> int:
        found = {key: state for key, state in answers[0].items() if key.startswith(tuple(task_ids))}
        return sum((state or "null") in states for state in found.values())

    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        task_id=ON_A,
        map_index=0,
        get_ti_count=count,
        get_task_states=lambda **asked: {"run": dict(answers.pop(0) if len(answers) > 1 else answers[0])},
        xcom_pull=lambda task_ids, key, map_indexes: (
            {"status": (outcomes or {})[map_indexes]} if map_indexes in (outcomes or {}) else None
        ),
    )
    watch = SimpleNamespace(train_tasks={"gpu-a": ON_A, "gpu-b": ON_B})
    tasks = ["sweep.plan", ON_A, ON_B, "sweep.watch", *IN_RESERVE, "sweep.report", "other.round_2.plan"]
    return {"ti": ti, "dag": SimpleNamespace(task_ids=tasks, get_task=lambda name: watch)}


def settings(**more: Any) -> SweepSettings:
    return SweepSettings(cluster=TWO, group="sweep", planning_seconds=1.0, **more)


def end(found: Any, reserve: bool = True) -> None:
    skip_watch_after_last(found, settings(), 1, "gpu-a", reserve)


@pytest.mark.parametrize("last", ["success", "failed", "skipped", "upstream_failed"])
def test_the_last_training_to_end_has_the_reserve_skipped(skipped: list[list[str]], last: str) -> None:
    end(
        context(
            {"sweep.watch": "up_for_reschedule", f"{ON_A}_0": "running", f"{ON_A}_1": last, ON_B: "skipped"}
        )
    )
    assert skipped == [["sweep.watch", *IN_RESERVE]]


@pytest.mark.parametrize("other", ["running", "queued", "up_for_retry", "scheduled", None])
def test_who_is_not_the_last_skips_nothing(skipped: list[list[str]], other: str | None) -> None:
    end(context({f"{ON_A}_0": "running", f"{ON_B}_0": "success", f"{ON_B}_1": other}))
    end(context({f"{ON_A}_0": "running", ON_B: None}))
    assert skipped == []


def test_of_two_that_end_at_once_one_sees_the_other(skipped: list[list[str]]) -> None:
    states: dict[str, str | None] = {f"{ON_A}_0": "running", f"{ON_B}_1": "running"}
    end(context(states, outcomes={1: "failed"}))
    assert skipped == [], "it may be tried again"
    end(context(states, outcomes={1: "finished"}))
    assert len(skipped) == 1


@pytest.mark.parametrize("own", [None, "failed", "queued"])
def test_a_task_that_was_cleared_or_marked_skips_nothing(skipped: list[list[str]], own: str | None) -> None:
    end(context({f"{ON_A}_0": own, f"{ON_B}_0": "success"}))
    assert skipped == []


def test_a_watch_that_looks_just_now_is_skipped_after_its_look(skipped: list[list[str]]) -> None:
    states: dict[str, str | None] = {f"{ON_A}_0": "running", f"{ON_B}_0": "success"}
    looks = {**states, "sweep.watch": "running"}
    end(context(looks, looks, {**states, "sweep.watch": "up_for_reschedule"}))
    assert len(skipped) == 3


def test_in_rounds_before_the_last_the_watch_alone_is_skipped_and_waited_for_by_nobody(
    skipped: list[list[str]],
) -> None:
    """Its next look may be far away, where a clock was set back, and the report waits for it."""
    states: dict[str, str | None] = {f"{ON_A}_0": "running", f"{ON_B}_0": "success"}
    end(context({**states, "sweep.watch": "up_for_reschedule"}), reserve=False)
    end(context({**states, "sweep.watch": "running"}), reserve=False)
    assert skipped == [["sweep.watch"], ["sweep.watch"]]


def test_what_is_asked_of_airflow_grows_with_the_jobs_and_not_with_their_square(
    skipped: list[list[str]],
) -> None:
    """Two tasks train at once on each node; as one ends, another begins."""

    def answered(jobs: int) -> tuple[int, int]:
        """How many requests, and how many tasks' states were in the answers."""
        tasks = [f"{(ON_A, ON_B)[i % 2]}_{i // 2}" for i in range(jobs)]
        requests = states = 0
        for ending in range(jobs):
            now: dict[str, str | None] = dict.fromkeys(tasks[:ending], "success")
            now |= dict.fromkeys(tasks[ending : ending + 4], "running")
            now |= dict.fromkeys(tasks[ending + 4 :], "scheduled")
            found = context(now)
            found["ti"].task_id, _, index = tasks[ending].rpartition("_")
            found["ti"].map_index = int(index)
            count, ask = found["ti"].get_ti_count, found["ti"].get_task_states

            def counted(of: Any, **asked: Any) -> Any:
                nonlocal requests, states
                answer = of(**asked)
                requests += 1
                states += 1 if isinstance(answer, int) else len(answer["run"])
                return answer

            found["ti"].get_ti_count = partial(counted, count)
            found["ti"].get_task_states = partial(counted, ask)
            skip_watch_after_last(found, settings(), 1, found["ti"].task_id.rpartition(".")[2], True)
        return requests, states

    small, large = answered(20), answered(200)
    assert len(skipped) == 2, "the last of each did"
    assert large[0] <= 200 + 4
    assert large[1] <= 11 * small[1], (small, large)


def test_training_has_ended_whatever_airflow_answers(caplog: pytest.LogCaptureFixture) -> None:
    found = context({})
    found["ti"].get_task_states = lambda **asked: 1 / 0
    end(found)
    assert "not skipped yet: division by zero" in caplog.text


def entry_of(name: str, **fields: Any) -> PlanEntry:
    place = {"technique": "single", "devices": 1, "node": "gpu-a", "device_ids": [0], "kind": "cpu"}
    when = {"attempt": 100.0, "position": 0, "start": 0.0, "end": 1.0, "after": []}
    job = Job(name, "torch.nn:Linear", "torch.utils.data:DataLoader", hparams=HParams(epochs=1))
    known = {"name": name, "job": job.to_dict(), "parameters": {}, "fingerprint": "f"}
    return PlanEntry.from_dict({**known, **place, **when, **fields})


def train(
    monkeypatch: pytest.MonkeyPatch, end: Exception | None, *, number: int | None, most: int
) -> bool | None:
    """Whether a task that ends so, in a round of so many, asks for the reserve to be skipped with the watch;
    None where it does not ask for the watch either."""
    asked: list[Any] = []
    monkeypatch.setattr(round_train, "skip_watch_after_last", lambda *told: asked.append(told))

    def execute(self: Any, context: Any) -> dict[str, Any]:
        if end is not None:
            raise end
        return {}

    monkeypatch.setattr(TrainOperator, "execute", execute)
    operator = round_train.RoundTrainOperator(
        task_id="train",
        entry=entry_of("one", round=number).to_dict(),
        node=A.to_dict(),
        settings=settings(rounds=Rounds(most=most)),
    )
    found: Any = {"ti": SimpleNamespace(dag_id="dag", run_id="run")}
    with nullcontext() if end is None else pytest.raises(type(end)):
        operator.execute(found)
    return asked[0][-1] if asked else None


@pytest.mark.usefixtures("home")
def test_the_reserve_is_skipped_from_the_last_round_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(monkeypatch, None, number=None, most=1)
    assert train(monkeypatch, AirflowFailException("its own fault"), number=None, most=1)
    assert train(monkeypatch, TryAgainError("it is tried again"), number=None, most=1) is None
    assert train(monkeypatch, None, number=2, most=1) is None
    assert train(monkeypatch, None, number=1, most=2) is False
    assert train(monkeypatch, None, number=2, most=2)


def reserve() -> PlanOperator:
    return PlanOperator(
        task_id="plan",
        number=2,
        settings=settings(),
        earlier=["sweep.plan"],
        trained=[ON_A, ON_B],
        profile_tasks=[],
    )


def test_the_plan_in_reserve_is_skipped_unless_the_round_before_was_ended(home: Path) -> None:
    ti = SimpleNamespace(
        dag_id="dag", run_id="run", xcom_pull=lambda task_ids, key, map_indexes: {"attempt": 100.0}.get(key)
    )
    found: Any = {"ti": ti}
    sweep = SweepContext.of(found, "sweep")
    with pytest.raises(AirflowSkipException, match="no node was lost"):
        reserve()._state_so_far(found, sweep)
    over = over_file(sweep, 1, 100.0)
    over.parent.mkdir(parents=True)
    over.touch()
    with pytest.raises(AirflowSkipException, match="no earlier round has a plan"):
        reserve()._state_so_far(found, sweep)


def watch(states: dict[str, str]) -> tuple[RoundWatchOperator, Any]:
    operator = RoundWatchOperator(
        task_id="watch",
        number=1,
        settings=settings(),
        plan_task="sweep.plan",
        train_tasks={"gpu-a": ON_A, "gpu-b": ON_B},
    )
    known = {"attempt": 100.0, "return_value": [{"node": "gpu-a"}, {"node": "gpu-b"}, {"node": "gpu-b"}]}
    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        xcom_pull=lambda task_ids, key, map_indexes: known[key],
        get_task_states=lambda **_: {"run": states},
    )
    return operator, {"ti": ti}


def test_a_lost_node_s_tasks_are_skipped_and_the_round_is_over(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(round_watch, "skip_tasks", told.append)
    monkeypatch.setattr(round_watch, "AWAY_SECONDS", 0.2)
    monkeypatch.setattr(inventory, "queues_with_a_worker", lambda seconds=0.0: {A.queue})
    over = home / "sweeps/dag/run/sweep/round_1_100.0.over"
    running = {f"{ON_A}_0": "running", f"{ON_B}_0": "running", f"{ON_B}_1": "up_for_retry"}
    operator, context = watch(running)
    assert not operator.poke(context), "a worker that is restarted finds its tasks again"
    assert not over.exists()
    assert told == []
    operator, context = watch({**running, f"{ON_B}_0": "queued"})
    assert operator.poke(context)
    assert over.exists()
    assert told == [[(ON_B, 0), (ON_B, 1)]]


def active(name: str, node: str, *jobs: str) -> ActiveSweep:
    option = Option("single", 2, {"cpu": 100.0})
    planned = tuple(SharedJob(PlannedJob(job, (option,), (node,))) for job in jobs)
    facts = SharedSweep(name, planned, arrived=time.time(), alone=100.0)
    return ActiveSweep(
        dag_id="dag", run_id=name, folder=f"sweeps/{name}", made=1.0, nodes=TWO.nodes, sweep=facts
    )


def test_a_round_ends_where_jobs_that_wait_are_better_elsewhere_since_others_came_or_ended(
    home: Path,
) -> None:
    """Two jobs wait in a row on a node, and the other is idle since who had it has ended."""
    ledger, now, before = Ledger(home), time.time(), ["dag/other/sweep"]
    entries = [
        entry_of(job, node="gpu-a", planned_makespan=200.0, attempt=now, round=1) for job in ("j1", "j2")
    ]
    found = {"attempt": now, "return_value": [entry.to_dict() for entry in entries], OTHERS_KEY: before}
    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        xcom_pull=lambda task_ids, key, map_indexes: found[key],
        get_task_states=lambda **_: {"run": {f"{ON_A}_0": "running", f"{ON_A}_1": "running"}},
    )
    over = home / f"sweeps/dag/run/sweep/round_1_{now}.over"

    def ends(**more: Any) -> bool:
        policy = settings(rounds=Rounds(**{"most": 3, "off_by": 0.1, **more}))
        tasks = {"gpu-a": ON_A, "gpu-b": ON_B}
        operator = RoundWatchOperator(
            task_id="watch", number=1, settings=policy, plan_task="sweep.plan", train_tasks=tasks
        )
        assert not operator.poke(cast(Any, {"ti": ti}))
        is_over = over.exists()
        over.unlink(missing_ok=True)
        return is_over

    assert not ends(), "the ledger does not know it"
    ledger.write(active("dag/run/sweep", "gpu-a", "j1", "j2"))
    ledger.write(other := active("dag/other/sweep", "gpu-b", "o1", "o2", "o3"))
    assert not ends(), "all is as it was planned"
    ledger.remove(other.key)
    assert ends()
    assert not ends(off_by=0.6), "it wins half"
    assert not ends(off_by=None)
    assert not ends(most=1), "no plan follows"
    found[OTHERS_KEY] = []
    assert not ends(), "no other has come, or ended"
    late = [entry_of(job, node="gpu-a", planned_makespan=90.0, attempt=now, round=1) for job in ("j1", "j2")]
    found["return_value"] = [entry.to_dict() for entry in late]
    assert ends(), "it takes longer than was planned"
    bound = {**entries[0].job.to_dict(), "nodes": ["gpu-a"]}
    one, other = (entry.to_dict() for entry in entries)  # type: ignore[assignment]
    found |= {OTHERS_KEY: before, "return_value": [{**one, "job": bound}, other]}
    assert ends(), "one may go"
    found["return_value"] = [{**entry.to_dict(), "job": {**bound, "name": entry.name}} for entry in entries]
    assert not ends(), "they may run on this node alone"


def bound_and_free() -> Problem:
    option = Option("single", 1, {"cpu": 10.0})
    jobs = PlannedJob("free", (option,)), PlannedJob("bound", (option,), nodes=("gpu-b",))
    return Problem("x", TWO.nodes, jobs)


def test_what_fits_nowhere_else_waits_for_its_node_because_no_round_follows(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_task, "lost", lambda cluster: [B])
    operator = reserve()
    problem = operator.on_what_is_there(bound_and_free())
    assert [job.name for job in problem.jobs] == ["free"]
    assert problem.nodes == (A,)
    assert operator.waiting == ("bound",)
    before = entry_of("bound", node="gpu-b", ends_at=50.0)
    stand = SweepState(
        settings=settings(),
        number=2,
        problem=problem,
        jobs={},
        estimates={},
        before={"bound": before},
        progress={"bound": Progress()},
        standing=(100.0,),
    )
    going: Any = SimpleNamespace(dropped={})
    sweep = SweepContext("dag", "run", "sweep", home)
    (entry,) = operator._entries_to_conclude(sweep, stand, going, set(), 9.0, 1)
    assert entry.place == before.place
    assert (entry.round, entry.attempt, entry.position, entry.ends_at) == (2, 9.0, 1, None)
    run = sweep.job_folder("bound") / "runs" / "0001"
    run.mkdir(parents=True)
    place: dict[str, Any] = {"node": "gpu-b", "slots": 2, "devices": 1, "device_ids": (0,)}
    spec = RunSpec(job=entry.job, technique="single", folder="f", priority=(100.0, 0), **place)
    (run / "alive").touch()
    (run / "spec.json").write_text(json.dumps(spec.to_dict()))
    (entry,) = operator._entries_to_conclude(sweep, stand, going, {"bound"}, 9.0, 1)
    assert entry.goes_on == (100.0, 0), "it finished meanwhile, and is concluded once"


def test_with_another_round_to_come_it_may_come_back_then(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_task, "lost", lambda cluster: [B])
    operator = reserve()
    operator.number = 1
    assert [job.name for job in operator.on_what_is_there(bound_and_free()).jobs] == ["free"]
    assert operator.waiting == ()
