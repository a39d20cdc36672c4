"""A node less is a node less: those that do not answer, or are drained, are left out of plans."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.cli import main
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import inventory, plan_task
from saturn_airflow.operators.drains import drain, drained, undrain
from saturn_airflow.operators.first_plan import to_plan
from saturn_airflow.operators.plan_task import PlanOperator
from saturn_airflow.operators.presence import LEFT_OUT_KEY, absent, left_out_now, present, why_absent
from saturn_airflow.operators.report_task import devices_of
from saturn_airflow.operators.round_watch import RoundWatchOperator
from saturn_airflow.operators.wave_tasks import Learned
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import by_key

A, B = Node("gpu-a", devices=2, kind="cpu"), Node("gpu-b", devices=2, kind="cpu")
TWO = Cluster(A, B)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__SATURN__NODES", "gpu-a:2:cpu, gpu-b:2:cpu")
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setattr(inventory, "PATIENCE_SECONDS", 0.0)
    return tmp_path


def listening(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> None:
    heard = {node.queue for node in nodes}
    monkeypatch.setattr(inventory, "queues_with_a_worker", lambda seconds=0.0: heard)


def job(name: str, nodes: list[str] | None = None) -> Job:
    hparams = HParams(batches=10)
    return Job(name, "shop:model", "shop:data", "shop:loss", hparams=hparams, nodes=nodes)


def context(**xcoms: Any) -> Any:
    states: dict[str, str] = {}
    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        xcom_pull=lambda task_ids, key, map_indexes: xcoms.get(key),
        get_task_states=lambda **_: {"run": states},
    )
    return {"ti": ti, "states": states}


def test_a_node_that_does_not_answer_is_left_out_or_an_error_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening(monkeypatch, A)
    assert absent(TWO, "leave_out") == {"gpu-b": "no worker listens on its queue 'saturn.gpu-b'"}
    with pytest.raises(InvalidSweepError, match=r"no worker listens on the queue 'saturn\.gpu-b'"):
        absent(TWO, "fail")


def test_where_no_node_answers_the_sweep_fails_whatever_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    listening(monkeypatch)
    with pytest.raises(InvalidSweepError, match=r"no worker listens on the queue 'saturn\.gpu-a'"):
        absent(TWO, "leave_out")


def test_a_drained_node_is_left_out_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    listening(monkeypatch, A)
    drain("gpu-b", "new disks")
    assert absent(TWO, "fail") == {"gpu-b": "it is drained (new disks)"}
    drain("gpu-a")
    with pytest.raises(InvalidSweepError, match="all nodes of the sweep are drained; `saturn undrain gpu-a"):
        absent(TWO, "leave_out")
    assert undrain("gpu-a")
    assert not undrain("gpu-a")
    assert list(drained()) == ["gpu-b"]


def test_what_is_drained_while_a_sweep_is_measured_is_not_planned_with() -> None:
    given = {"gpu-z": "of another cluster"}
    assert left_out_now(context(**{LEFT_OUT_KEY: given}), "trials", TWO) == {}
    assert left_out_now(context(), "trials", TWO) == {}, "as an earlier version left it"
    drain("gpu-b")
    now = left_out_now(context(), "trials", TWO)
    assert present(TWO, now) == Cluster(A)
    drain("gpu-a")
    assert left_out_now(context(), "trials", TWO) == {}, "a plan for no node would be none"


def test_jobs_are_planned_on_the_nodes_that_are_left_and_the_others_say_why() -> None:
    jobs = [job("free"), job("either", ["gpu-a", "gpu-b"]), job("bound", ["gpu-b"])]
    left_out = {"gpu-b": "it is drained"}
    known = [
        Estimate(
            fingerprint=fingerprint(jobs[0]),
            technique="single",
            devices=1,
            kind="cpu",
            version="1",
            seconds_per_batch=1.0,
            setup_seconds=1.0,
        )
    ]
    knowledge = Knowledge.of(jobs, present(TWO, left_out), ["single"], known)
    estimates = by_key(*known)
    planned, unplanned = to_plan(Learned(knowledge, [], {}, 0, 0.0), estimates, [], "auto", left_out)
    assert [(p.name, p.nodes) for p in planned] == [("free", None), ("either", ("gpu-a",))]
    assert unplanned == [{"job": "bound", "reason": "its node gpu-b takes no part: it is drained"}]
    assert Problem("x", knowledge.cluster.nodes, tuple(planned)).nodes == (A,)
    assert why_absent(jobs[1], left_out) is None
    problem = knowledge.problem(estimates)
    assert problem is not None
    assert [p.name for p in problem.jobs] == ["free", "either"]


def test_devices_of_nodes_that_took_no_part_are_no_idle_devices() -> None:
    assert devices_of(Cluster(A).to_dict()) == 2
    assert devices_of(None) == 0


def problem_of(*names: str) -> Problem:
    option = Option("single", 1, {"cpu": 10.0})
    return Problem("x", TWO.nodes, tuple(PlannedJob(name, (option,)) for name in names))


def plan_operator(monkeypatch: pytest.MonkeyPatch) -> PlanOperator:
    monkeypatch.setattr(plan_task, "lost", lambda cluster: [])
    return PlanOperator(
        task_id="plan",
        number=2,
        settings=SweepSettings(cluster=TWO, group="sweep", rounds=Rounds(most=2), planning_seconds=1.0),
        earlier=[],
        trained=[],
        profile_tasks=[],
    )


def test_a_later_round_leaves_drained_nodes_and_comes_back_to_those_that_are_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator, problem = plan_operator(monkeypatch), problem_of("one")
    drain("gpu-b")
    without = operator.on_what_is_there(problem)
    assert without.nodes == (A,)
    assert operator.left_out == {"gpu-b": "it is drained"}
    undrain("gpu-b")
    assert operator.on_what_is_there(without).nodes == (A, B)
    assert operator.left_out == {}


def watch() -> tuple[RoundWatchOperator, Any, Path]:
    tasks = {node.name: f"sweep.round_1.train.{node.name}" for node in TWO}
    operator = RoundWatchOperator(
        task_id="watch",
        number=1,
        settings=SweepSettings(cluster=TWO, group="sweep"),
        plan_task="sweep.round_1.plan",
        train_tasks=tasks,
    )
    found = context(attempt=100.0, return_value=[{"node": "gpu-a"}, {"node": "gpu-b"}])
    found["states"].update({f"{task}_0": "running" for task in tasks.values()})
    return operator, found, Path("sweeps/dag/run/sweep/round_1_100.0.over")


def test_a_drain_ends_the_round_where_its_jobs_can_go_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening(monkeypatch, A, B)
    operator, context, over = watch()
    assert not operator.poke(context)
    assert not (home / over).exists()
    drain("gpu-b")
    assert not operator.poke(context)
    assert (home / over).exists()


def test_a_drain_of_a_node_without_jobs_or_of_all_nodes_ends_no_round(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening(monkeypatch, A, B)
    operator, context, over = watch()
    context["states"]["sweep.round_1.train.gpu-b_0"] = "success"
    drain("gpu-b")
    assert not operator.poke(context)
    context["states"]["sweep.round_1.train.gpu-b_0"] = "running"
    drain("gpu-a")
    assert not operator.poke(context)
    assert not (home / over).exists()


def test_the_commands_drain_list_and_undrain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "gpu-b", "--reason", "new disks"]) == 0
    assert main(["drain"]) == 0
    assert "gpu-b: it is drained (new disks)" in capsys.readouterr().out
    assert main(["drain", "gpu-x"]) == 0
    assert "gpu-x: no node of this deployment (gpu-a, gpu-b)" in capsys.readouterr().out
    assert main(["undrain", "gpu-b", "gpu-a"]) == 0
    assert capsys.readouterr().out == "gpu-b: plans use it again\ngpu-a: was not drained\n"
    assert main(["drain", "../gpu"]) == 2
    assert list(drained()) == ["gpu-x"]


@pytest.mark.parametrize("note", ["{", "{}", "[]", "3"])
def test_a_damaged_note_of_a_drain_is_named(note: str, home: Path) -> None:
    drain("gpu-b")
    (home / "drained" / "gpu-b.json").write_text(note)
    with pytest.raises(InvalidSweepError, match=r"gpu-b\.json is damaged; run `saturn drain gpu-b` again"):
        drained()
