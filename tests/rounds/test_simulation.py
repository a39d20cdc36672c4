"""Sweeps on paper: repeatable, sound, and better for their rounds."""

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import INSTANCES, problems

from saturn_airflow.cli import main
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import Chosen, MedianStopping, SuccessiveHalving
from saturn_airflow.planning.online.actual_seconds import truth
from saturn_airflow.planning.online.simulation import Costs, NodeLoss, clairvoyant, simulate

TXT = Problem.read(INSTANCES / "txt-2x8.json")
QUICK = 0.1


def assert_sound(found: Any, jobs: Any) -> None:
    trained = dict.fromkeys(jobs, 0.0)
    for stretch in found.stretches:
        trained[stretch.job] += stretch.trained
    for job, share in trained.items():
        assert share == pytest.approx(1.0) or (job in found.pruned and share < 1)
    by_device: dict[tuple[str, int], list[Any]] = {}
    for s in found.stretches:
        for device in s.place.device_ids:
            by_device.setdefault((s.place.node, device), []).append((s.start, s.end))
    for spans in by_device.values():
        spans.sort()
        for one, two in itertools.pairwise(spans):
            assert one[1] <= two[0] + 1e-6 * found.makespan


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    problems(releases=False, busy=False),
    st.integers(1, 4),
    st.integers(0, 99),
    st.sampled_from([None, SuccessiveHalving(), MedianStopping()]),
)
def test_every_job_is_trained_whole_or_dropped_and_devices_run_one_job(
    problem: Any, rounds: Any, seed: Any, rule: Any
) -> None:
    found = simulate(
        problem, rounds=Rounds(most=rounds), seed=seed, selection=rule, noise=0.5, time_limit=0.02
    )
    assert_sound(found, [job.name for job in problem.jobs])
    assert len(found.rounds) <= rounds


@settings(max_examples=25, deadline=None)
@given(problems(releases=False, busy=False), st.integers(1, 4), st.integers(0, 99), st.floats(0, 1))
def test_what_a_lost_node_ran_is_trained_elsewhere(problem: Any, rounds: Any, seed: Any, share: Any) -> None:
    nodes = (*problem.nodes, dataclasses.replace(problem.nodes[0], name="lost", queue=""))
    jobs = tuple(dataclasses.replace(job, nodes=None) for job in problem.jobs)
    more = dataclasses.replace(problem, nodes=nodes, jobs=jobs)
    quick = Costs(checkpoint=0.1, launch=0.1, checkpoint_every=1.0)
    lost_at = [NodeLoss("lost", share)]
    found = simulate(
        more, rounds=Rounds(most=rounds), seed=seed, failures=lost_at, costs=quick, time_limit=0.02
    )
    assert_sound(found, [job.name for job in problem.jobs])
    lost = [s for s in found.stretches if s.place.node == "lost"]
    assert all(s.start <= found.planned * share * (1 + 1e-9) for s in lost)


def test_a_job_that_is_done_is_not_bound_to_a_node_that_is_lost() -> None:
    nodes = (Node("a", 1, "cpu"), Node("b", 1, "cpu"))
    quick, long = (
        PlannedJob(name, (Option("single", 1, {"cpu": seconds}),), nodes=(node,))
        for name, seconds, node in (("quick", 10.0, "a"), ("long", 100.0, "b"))
    )
    problem = Problem("p", nodes, (quick, long))
    found = simulate(problem, rounds=Rounds(most=3), failures=[NodeLoss("a", 0.5)], time_limit=0.02)
    assert_sound(found, ["quick", "long"])
    with pytest.raises(InvalidSweepError, match="quick"):
        simulate(problem, rounds=Rounds(most=3), failures=[NodeLoss("a", 0.01)], time_limit=0.02)


@pytest.mark.slow
def test_a_seed_always_gives_the_same_simulation() -> None:
    one, two = (simulate(TXT, rounds=Rounds(most=4), seed=5, time_limit=QUICK) for _ in range(2))
    other = simulate(TXT, rounds=Rounds(most=4), seed=6, time_limit=QUICK)
    assert one.to_dict() == two.to_dict()
    assert one.to_dict() != other.to_dict()


@pytest.mark.slow
def test_rounds_win_back_what_wrong_estimates_cost() -> None:
    seeds = range(5)
    known = [clairvoyant(TXT, noise=0.2, seed=seed, shape="job", time_limit=QUICK) for seed in seeds]

    def mean(rounds: Any) -> Any:
        found = [
            simulate(TXT, rounds=Rounds(most=rounds), seed=s, shape="job", time_limit=QUICK) for s in seeds
        ]
        return statistics.fmean(f.makespan / k for f, k in zip(found, known, strict=True))

    once, four = mean(1), mean(4)
    assert four < 1 + (once - 1) / 2
    assert four < 1.05


@pytest.mark.slow
def test_with_right_estimates_rounds_cost_nothing() -> None:
    for seed in range(3):
        once = simulate(TXT, rounds=Rounds(most=1), noise=0.0, seed=seed, time_limit=QUICK)
        rounds = simulate(TXT, rounds=Rounds(most=4), noise=0.0, seed=seed, time_limit=QUICK)
        assert once.makespan == pytest.approx(once.planned)
        assert rounds.makespan <= once.makespan * (1 + 1e-9)


def test_a_round_ends_when_a_job_strays() -> None:
    straying = simulate(TXT, rounds=Rounds(most=3, off_by=0.05), noise=0.5, seed=1, time_limit=QUICK)
    exact = simulate(TXT, rounds=Rounds(most=3, off_by=0.05), noise=0.0, seed=1, time_limit=QUICK)
    assert len(straying.rounds) > 1
    assert len(exact.rounds) == 1


def test_halving_takes_a_fraction_of_the_time_and_keeps_the_best() -> None:
    whole = simulate(TXT, rounds=Rounds(most=1), seed=2, time_limit=QUICK)
    halved = simulate(
        TXT, rounds=Rounds(most=4), seed=2, selection=SuccessiveHalving(), epochs=8, time_limit=QUICK
    )
    assert len(halved.pruned) == 10
    assert halved.makespan < whole.makespan / 2


def raises(histories: Any) -> None:
    raise RuntimeError("a bug of mine")


def test_a_selection_that_raises_changes_nothing_but_is_told_of() -> None:
    same: dict[str, Any] = {"rounds": Rounds(most=3), "seed": 2, "time_limit": QUICK}
    without = simulate(TXT, **same)
    found = simulate(TXT, selection=Chosen(raises), **same)
    assert found.makespan == without.makespan
    assert "a bug of mine" in found.warnings[0]


def test_errors_are_as_large_and_as_alike_as_they_are_said_to_be() -> None:
    factors = {}
    for shape in ("job", "make", "strategy"):
        actual = truth(TXT, 0.2, 3, shape)
        factors[shape] = [
            [o.seconds["a100"] / p.seconds["a100"] for o, p in zip(j.options, k.options, strict=True)]
            for j, k in zip(actual.jobs, TXT.jobs, strict=True)
        ]
    assert all(row == pytest.approx([row[0]] * len(row)) for row in factors["job"])
    assert len({round(row[0], 6) for row in factors["job"]}) == 12
    assert len({round(row[0], 6) for row in factors["make"]}) == 4
    assert len({round(f, 6) for row in factors["strategy"] for f in row}) > 40


def command(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    code = main(["simulate", str(INSTANCES / "txt-2x8.json"), "--time-limit", "0.05", *words])
    return code, capsys.readouterr()


def test_the_command_prints_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = command(capsys, "--rounds", "3", "--fail-node", "node01@0.4", "--seed", "1")
    assert code == 0
    assert "a node was lost" in printed.out
    assert "planned once" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--share", "2"], "share is 2"),
        (["--off-by", "-1"], "off_by is -1"),
        (["--every", "0"], "every_minutes is 0"),
        (["--epochs", "0"], "--epochs 0: give a number of at least 1"),
        (["--checkpoint", "-1"], "--checkpoint -1: give a number of at least 0"),
        (["--checkpoint", "nan"], "--checkpoint nan: give a number of at least 0"),
        (["--launch", "inf"], "--launch inf: give a number of at least 0"),
        (["--time-limit", "inf"], "--time-limit inf: give a number of at least 0.001"),
        (["--noise", "1000"], "--noise 1000: give a number from 0 to 10"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = command(capsys, *words)
    assert code == 2
    assert said in printed.err


def test_devices_that_are_free_later_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = json.loads((INSTANCES / "txt-2x8.json").read_text())
    problem["nodes"][0]["free"] = [0, 60, 0, 0, 0, 0, 0, 0]
    (tmp_path / "busy.json").write_text(json.dumps(problem))
    assert main(["simulate", str(tmp_path / "busy.json")]) == 2
    assert "devices that are free later" in capsys.readouterr().err


def test_the_command_prints_json_that_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rounds", "3", "--selection", "halving", "--json")
    (_, one), (_, two) = command(capsys, *words), command(capsys, *words)
    assert one.out == two.out
    found = json.loads(one.out)
    assert found["rounds"][1]["pruned"]
    assert found["makespan"] < found["one_shot"]


def test_the_command_draws_errors_of_the_shape_that_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = ("make", "strategy")
    found = [command(capsys, "--rounds", "1", "--json", "--shape", shape)[1].out for shape in told]
    assert len({json.loads(out)["makespan"] for out in found}) == len(told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rounds", "0"), "at least 1"),
        (("--every", "0.01"), "most of a minute"),
        (("--noise", "-1"), "--noise -1: give a number from 0 to 10"),
        (("--fail-node", "nowhere@0.5"), "no node 'nowhere'"),
        (("--fail-node", "node00@soon"), "NAME@SHARE"),
        (("--fail-node", "node00"), "NAME@SHARE"),
        (("--fail-node", "node00@0.1", "--fail-node", "node01@0.2"), "all nodes are lost"),
    ],
)
def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], words: Any, message: Any) -> None:
    code, printed = command(capsys, *words)
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_failure_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidSweepError, match="give a share"):
        simulate(TXT, rounds=Rounds(most=1), failures=[NodeLoss("node00", -1.0)])
