"""``saturn simulate --arrivals FILE``, and the form of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow.cli import main
from saturn_airflow.sharing.arrivals_file import ArrivalsFile

STRATEGIES = [{"technique": "ddp", "devices": k, "seconds": {"a100": 800 / k**0.8}} for k in (1, 2, 4)]


def week(**more: Any) -> dict[str, Any]:
    """A file of arrivals: a long sweep, and a short urgent one that arrives after it."""
    return {
        "format": 1,
        "name": "week",
        "nodes": [
            {"name": "gpu-a", "devices": 4, "kind": "a100"},
            {"name": "gpu-b", "devices": 2, "kind": "a100"},
        ],
        "sweeps": [
            {
                "name": "long",
                "arrives": 0,
                "team": "research",
                "jobs": [{"name": f"j{i}", "strategies": STRATEGIES} for i in range(12)],
            },
            {
                "name": "urgent",
                "arrives": 300,
                "priority": 1,
                "deadline": 3000,
                "jobs": [{"name": "j", "strategies": STRATEGIES}],
            },
        ],
        **more,
    }


def test_sweeps_that_arrive_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "week.json"
    path.write_text(json.dumps(week()))
    asked = ["simulate", "--arrivals", str(path), "--noise", "0.2", "--seed", "3"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by_name = {row["sweep"]: row for row in told["sweeps"]}
    assert by_name["urgent"]["in_time"]
    assert by_name["urgent"]["done"] < by_name["long"]["done"]
    assert told["not_done"] == []
    assert sum(ran["trained"] for ran in told["ran"]) == pytest.approx(13)
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert main(asked) == 0
    assert "2 of 2 sweeps done" in capsys.readouterr().out


def test_nodes_that_go_and_never_come_back_leave_what_fits_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = week(changes=[{"at": 100, "goes": "gpu-a"}])
    data["sweeps"][1]["jobs"][0]["strategies"] = STRATEGIES[2:]
    path = tmp_path / "week.json"
    path.write_text(json.dumps(data))
    assert main(["simulate", "--arrivals", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["not_done"] == ["urgent"]
    assert main(["simulate", "--arrivals", str(path)]) == 0
    assert "not done, since no node was left that fits: urgent" in capsys.readouterr().out


def test_a_file_is_written_as_it_is_read() -> None:
    file = ArrivalsFile.from_dict(
        week(shares={"research": 0.5}, changes=[{"at": 1, "goes": "gpu-b"}, {"at": 2, "comes": "gpu-b"}])
    )
    assert ArrivalsFile.from_dict(json.loads(json.dumps(file.to_dict()))) == file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweeps": []}, "has no sweeps"),
        ({"format": 99}, "is a file of arrivals in format 99"),
        ({"sweeps": [{"name": "s", "jobs": []}]}, "has no jobs"),
        ({"sweeps": [{**week()["sweeps"][0], "arrives": -1}]}, "arrives is -1; give seconds"),
        ({"sweeps": [week()["sweeps"][0]] * 2}, "two sweeps are named 'long'"),
        ({"changes": [{"at": 5, "goes": "gpu-z"}]}, "there is no node 'gpu-z' to change"),
        ({"nodes": 3}, "is not in the expected form"),
    ],
)
def test_a_file_that_cannot_be_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "week.json"
    path.write_text(json.dumps(week(**change)))
    assert main(["simulate", "--arrivals", str(path)]) == 2
    assert message in capsys.readouterr().err
