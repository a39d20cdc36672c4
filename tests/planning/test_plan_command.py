"""``saturn plan``: what it prints, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_checker import faults
from planning_problems import INSTANCES

from saturn_airflow.cli import main

pytestmark = pytest.mark.slow

FILE = str(INSTANCES / "txt-2x8.json")


def small() -> dict[str, Any]:
    strategy = {"technique": "ddp", "devices": 1, "seconds": {"a": 10}}
    return {
        "name": "small",
        "nodes": [{"name": "n", "devices": 2, "kind": "a"}],
        "jobs": [{"name": "one", "strategies": [strategy]}, {"name": "two", "strategies": [strategy]}],
    }


def test_json_is_a_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FILE, "--time-limit", "5", "--json", "--processes", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert faults(json.loads(Path(FILE).read_text()), plan) == []
    assert {"name", "objective", "makespan", "lower_bound", "gap", "seconds", "assignments"} <= plan.keys()


def test_people_get_a_table_a_chart_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FILE, "--time-limit", "5", "--processes", "1"]) == 0
    out = capsys.readouterr().out
    for part in ("Plan of txt-2x8", "node01", "Makespan", "proven optimal", "Bounded by", "Devices train"):
        assert part in out


def test_comparison_names_every_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FILE, "--compare", "--time-limit", "1", "--processes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 5
    ours = found.pop("saturn")
    for other in found.values():
        assert other is None or other["makespan"] >= ours["makespan"]
    assert main(["plan", FILE, "--compare", "--time-limit", "1", "--processes", "1"]) == 0
    assert "current practice" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [["--objective", "mean-completion"], ["--objective", "device-time", "--deadline", "100000"]]
)
def test_other_objectives(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FILE, "--time-limit", "1", "--processes", "1", *more]) == 0
    assert "makespan" in capsys.readouterr().out


def test_a_gap_ends_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", FILE, "--time-limit", "30", "--processes", "1", "--json", "--gap"]
    assert main([*asked, "0.9"]) == 0
    loose = json.loads(capsys.readouterr().out)
    assert 0 < loose["gap"] <= 0.9, "no better one was looked for"
    for gap in ("-1", "2", "nan"):
        assert main([*asked, gap]) == 2
        assert f"the gap is {float(gap)}; give a share between 0 and 1" in capsys.readouterr().err


def test_a_previous_plan_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FILE, "--time-limit", "1", "--json", "--processes", "1"]) == 0
    earlier = tmp_path / "plan.json"
    earlier.write_text(capsys.readouterr().out)
    arguments = ["plan", FILE, "--time-limit", "1", "--json", "--processes", "1", "--previous"]
    assert main([*arguments, str(earlier)]) == 0
    capsys.readouterr()
    for text, said in (
        ("{}", "is no whole plan: it lacks 'name'"),
        (earlier.read_text()[:100], "is damaged: it is no JSON"),
        ("[1]", "is JSON, and no plan"),
    ):
        earlier.write_text(text)
        assert main([*arguments, str(earlier)]) == 2
        assert said in capsys.readouterr().err


def change(path: str, value: object) -> str:
    """``small()`` with the value at ``path`` changed, as JSON."""
    data: Any = small()
    *parents, last = path.split(".")
    at = data
    for key in parents:
        at = at[int(key)] if key.isdigit() else at[key]
    at[int(last) if last.isdigit() else last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list; it has to be a mapping with nodes, jobs"),
        (
            '{"nodes": [{"name": "a", "devices": 1, "kind": "cpu"}], "jobs": [{"name": "b", "strategies": '
            '[{"tecnique": "ddp", "devices": 1, "seconds": {"cpu": 3}}]}]}',
            "strategy 1 of job 'b' lacks 'technique'; is 'tecnique' meant to be it?",
        ),
        (
            '{"nodes": [{"name": "a", "devices": 1, "kind": "cpu"}], "jobs": [{"name": "b", "strategies": '
            '[{"technique": "ddp", "devices": 1, "seconds": 3}]}]}',
            "strategy 1 of job 'b' has seconds=3; give them by kind of device",
        ),
        ('{"nodes": [{"name": "a", "kind": "cpu"}], "jobs": []}', "node 'a' lacks 'devices'"),
        ("{}", "lacks 'nodes'"),
        (change("jobs", []), "has no jobs"),
        (change("jobs.1.name", "one"), "two jobs are named 'one'"),
        (change("jobs.0.strategies", []), "job 'one' has no strategy"),
        (change("jobs.0.strategies.0.seconds.a", 0), "takes 0 seconds"),
        (change("jobs.0.strategies.0.seconds.a", -3), "takes -3 seconds"),
        (change("jobs.0.strategies.0.seconds.a", float("inf")), "takes inf seconds"),
        (change("jobs.0.strategies.0.seconds.a", float("nan")), "takes nan seconds"),
        (change("jobs.0.strategies.0.seconds.a", "long"), "takes 'long' seconds"),
        (change("jobs.0.strategies.0.seconds", {"b": 3}), "kind 'b'"),
        (change("jobs.0.strategies.0.seconds", {}), "job 'one' fits on no node"),
        (change("jobs.0.strategies.0.devices", 3), "job 'one' fits on no node: it needs 3 x a"),
        (change("jobs.0.strategies.0.devices", 0), "on 0 devices"),
        (change("jobs.0.strategies.0.setup", 10), "setup of 10 seconds"),
        (change("jobs.0.nodes", ["m"]), "bound to node 'm'"),
        (change("jobs.0.release", -1), "release is -1"),
        (change("jobs.0.weight", "much"), "weight is 'much'"),
        (change("nodes.0.devices", 0), "devices is 0"),
        (change("nodes", []), "no nodes"),
        (change("nodes", [small()["nodes"][0]] * 2), "two nodes are named 'n'"),
        (change("nodes.0.kind", 5), "kind is 5"),
    ],
)
def test_bad_problems_are_one_message_and_exit_code_2(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "problem.json"
    path.write_text(text)
    assert main(["plan", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_a_file_that_can_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "nothing.json")]) == 2
    assert "can't be read" in capsys.readouterr().err
    assert main(["plan", str(tmp_path)]) == 2
    assert "can't be read" in capsys.readouterr().err
