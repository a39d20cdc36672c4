"""The command line: help to learn from, completion, exit statuses, and `saturn sweeps`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import tracking
from saturn_airflow.cli import COMMANDS, main, parser_of
from saturn_airflow.commands.examples import EXAMPLES
from saturn_airflow.launch import restarting
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model.folders import slug
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Assignment, Plan

ROOT = Path(__file__).parents[2]
PLAN = Plan("nightly", "makespan", 100.0, 90.0, 1.5, (Assignment("a", "ddp", 2, "local", (0, 1), 0, 60),))

FRAMES = 'Traceback (most recent call last):\n  File "shop.py", line 3, in model\n    import torchshop'
RAISED = "ModuleNotFoundError: No module named 'torchshop'"
WHY = {"<b>[red]bad": f"{FRAMES}\n{RAISED}", "untried": f"load_model raised {RAISED}\n{FRAMES}\n{RAISED}"}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with two sweeps of one DAG: a job that finished, one that failed, one without a run."""
    folder = tmp_path_factory.mktemp("sweeps")
    uri = f"sqlite:///{folder}/mlflow.db"
    for day in ("mon", "tue"):
        tags = {"saturn.sweep": f"nightly/{day}/sweep", "airflow.dag_id": "nightly"}
        sweep = tracking.open_sweep(uri, "nightly", day, tags, {"jobs": 2, "devices": 2}, folder / day)
        for name, status in (("good", "finished"), ("<b>[red]bad", "failed")):
            params = {"technique": "ddp", "devices": 2, "node": "local"}
            tags = {tracking.METRICS_TAG: '["top"]'}
            job = tracking.open_job(uri, sweep, name, params, tags, folder / day / name[:4].strip("<>"))
            job.follow({"event": "step", "step": 1, "epoch": 0, "loss": 0.25})
            if status == "finished":
                job.follow({"event": "eval", "step": 1, "epoch": 0, "metrics": {"top/1": 0.625}})
            job.close(status, WHY.get(name))
        sweep.log_plan(PLAN, promise={"seconds": 115.0, "confidence": 0.9})
        best = {"job": "good", "metric": "loss", "value": 0.25, "model_uri": "runs:/1/model"}
        ends = {"good": "finished", "<b>[red]bad": "failed", "untried": "not_planned"}
        jobs = [{"job": name, "status": status, "reason": WHY.get(name)} for name, status in ends.items()]
        hours = "gpu_hours" if day == "mon" else "device_hours"
        figures = {"actual_seconds": 110.0, "utilisation": 0.9, hours: 0.05}
        sweep.log_report({**figures, "best": best, "jobs": jobs})
        sweep.close("failed")
    return uri


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "MLFLOW_TRACKING_URI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_latest_sweeps_come_first(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "sweeps", "--uri", uri)
    assert out.index("nightly/tue/sweep") < out.index("nightly/mon/sweep")
    assert re.search(r"tue/sweep +failed .* 100\.0 s +11\.1% +110\.0 s +90% +good \(loss 0\.25\)", out)
    found = json.loads(printed(capsys, "sweeps", "list", "--json", "--limit", "1", "--uri", uri))
    assert [sweep["sweep"] for sweep in found] == ["nightly/tue/sweep"]
    assert found[0]["jobs"] == 2
    assert found[0]["best"]["value"] == 0.25
    both = json.loads(printed(capsys, "sweeps", "--json", "--uri", uri))
    assert [sweep["device_hours"] for sweep in both] == [0.05, 0.05], "an earlier version had gpu_hours"
    assert json.loads(printed(capsys, "sweeps", "--uri", uri, "--json", "--dag", "other")) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nightly", "nightly/tue/sweep", "run"])
def test_a_sweep_is_shown_job_by_job(uri: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    if how == "run":
        how = json.loads(printed(capsys, "sweeps", "--json", "--uri", uri))[0]["run_id"]
    out = printed(capsys, "sweeps", "show", how, "--uri", uri)
    assert out.startswith("nightly/tue/sweep  failed\n")
    assert re.search(r"^ *good +finished +ddp +2 +local .* 0\.25", out, re.MULTILINE)
    assert f"<b>[red]bad: {RAISED}\n" in out
    assert "makespan: planned 100.0 s (gap 11.1%), with 90% done in 115.0 s, actual 110.0 s; " in out
    assert re.search(r"^ *untried +not planned +- +- +- ", out, re.MULTILINE)
    assert f"untried: load_model raised {RAISED}\n" in out
    assert "Traceback" not in out
    assert "tracebacks: `saturn sweeps show nightly/tue/sweep --json` has them, " in out
    shown = json.loads(printed(capsys, "sweeps", "show", how, "--json", "--uri", uri))
    assert {job["job"]: job["status"] for job in shown["jobs"]} == {
        "good": "finished",
        "<b>[red]bad": "failed",
        "untried": "not_planned",
    }
    assert [job["reason"] for job in shown["jobs"]] == [None, *WHY.values()]
    assert shown["jobs"][0]["devices"] == 2
    assert [job["metrics"] for job in shown["jobs"]] == [{"top/1": 0.625}, {}, {}]
    assert re.search(r"eval loss +top/1 *$", out, re.MULTILINE)
    assert re.search(r"^ *good .* 0\.25 +- +0\.625 *$", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweeps", "show", "nowhere"], "MLflow knows no sweep 'nowhere'"),
        (["sweeps", "show", "nightly/sun/sweep"], "MLflow knows no sweep 'nightly/sun/sweep'"),
        (["sweeps", "--limit", "0"], "--limit 0: give a number from 1 to 50000"),
        (["sweeps", "--limit", "60000"], "--limit 60000: give a number from 1 to 50000"),
        (["plan", "nowhere.json"], "nowhere.json"),
        (["plan", "nowhere.json", "--processes", "0"], "--processes 0: give a number from 1 to "),
    ],
)
def test_what_can_not_be_done_is_one_line_and_status_2(
    uri: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    complaints = [line for line in err.splitlines() if not line.startswith("MLflow: ")]
    assert len(complaints) == 1
    assert said in complaints[0]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sweeps", "estimates"])
def test_the_connection_that_tasks_use_is_asked_first(
    uri: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MLFLOW_DEFAULT", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main([command]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"MLflow: http://127.0.0.1:9\nsaturn {command}: ")
    assert "secret" not in err


@pytest.mark.parametrize("leads", ["AIRFLOW__SECRETS__BACKEND", "AIRFLOW_CONFIG"])
@pytest.mark.slow
def test_a_connection_is_found_where_airflow_looks_for_it(leads: str, uri: str, tmp_path: Path) -> None:
    connections = tmp_path / "connections.json"
    connections.write_text(
        json.dumps({"mlflow_default": {"conn_type": "http", "host": "127.0.0.1", "port": 9}})
    )
    backend = "airflow.secrets.local_filesystem.LocalFilesystemBackend"
    kwargs = json.dumps({"connections_file_path": str(connections)})
    variables = {"AIRFLOW__SECRETS__BACKEND": backend, "AIRFLOW__SECRETS__BACKEND_KWARGS": kwargs}
    if leads == "AIRFLOW_CONFIG":
        (tmp_path / "own.cfg").write_text(f"[secrets]\nbackend = {backend}\nbackend_kwargs = {kwargs}\n")
        variables = {"AIRFLOW_CONFIG": str(tmp_path / "own.cfg")}
    said = saturn("estimates", AIRFLOW_HOME=str(tmp_path / "home"), MLFLOW_TRACKING_URI=uri, **variables)
    assert said.stderr.startswith("MLflow: http://127.0.0.1:9\n"), said.stderr


def test_a_store_that_is_not_there_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    assert main(["sweeps"]) == 2
    assert f"there is no MLflow store {tmp_path}/mlflow.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_mlflow_that_does_not_answer_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweeps", "--uri", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("saturn sweeps: ")


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"saturn-airflow {version('saturn-airflow')}\n"


def test_wrong_arguments_are_status_2() -> None:
    for words in ([], ["nothing"], ["sweeps", "--nothing"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_explained_with_examples_that_parse(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in EXAMPLES[command]:
        assert parser_of([command]).parse_args(shlex.split(line.partition(">")[0])[1:]).command == command
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert all(line in out for line in EXAMPLES[command])
    assert f"`saturn {command}" in (ROOT / "docs" / "cli.md").read_text()


def saturn(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "saturn"
    environment = {**os.environ, **variables}
    return subprocess.run(
        [str(program), *words], capture_output=True, text=True, env=environment, timeout=200
    )


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("saturn sw", {"sweeps"}),
        ("saturn sweeps sh", {"show"}),
        ("saturn plan x.json --obj", {"--objective"}),
        ("saturn plan x.json --objective m", {"makespan", "mean-completion"}),
    ],
)
def test_tab_completes(typed: str, expected: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    asked: dict[str, Any] = {"COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE": "1"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    saturn(**asked)
    assert {word.strip() for word in answer.read_text().split("\n")} == expected


@pytest.mark.slow
def test_colours_are_for_terminals(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b[" not in printed(capsys, "sweeps", "--uri", uri)
    assert "\x1b[31m" in saturn("sweeps", "--uri", uri, FORCE_COLOR="1", TERM="xterm").stdout


def test_restart_leaves_a_wish_for_jobs_that_have_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    folders = {}
    for name in ("a", "b <script>"):
        folder = tmp_path / "sweeps" / "nightly" / "mon" / "sweep" / slug(name)
        run = folder / "runs" / "0001"
        run.mkdir(parents=True)
        job = Job(name, load_model="m:f", load_dataloader="d:f")
        spec = RunSpec(job=job, technique="single", folder=str(folder), node="n", slots=1, devices=1)
        (run / "spec.json").write_text(json.dumps(spec.to_dict()))
        (run / "alive").touch()
        folders[name] = folder
    out = printed(capsys, "restart", "nightly", "mon", "b <script>", "--from-scratch")
    assert "b <script>: starts from scratch" in out
    assert {name: restarting.wish_of(folder) for name, folder in folders.items()} == {
        "a": None,
        "b <script>": "from_scratch",
    }
    printed(capsys, "restart", "nightly", "mon", "--go-on")
    assert {restarting.wish_of(folder) for folder in folders.values()} == {"go_on"}
    assert "a: is trained as planned" in printed(capsys, "restart", "nightly", "mon", "--as-planned")
    assert {restarting.wish_of(folder) for folder in folders.values()} == {"as_planned"}
    for words, says in {
        ("nightly", "tue", "--go-on"): "there is nothing of the run 'tue' of 'nightly'",
        (
            "nightly",
            "mon",
            "c",
            "--go-on",
        ): "no job 'c' of that run has begun; those that have are a, b <script>",
    }.items():
        assert main(["restart", *words]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--slots", "--short-slots"])
def test_a_pool_has_at_least_one_slot(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pools", option, "0"]) == 2
    assert f"{option} 0: give a number of at least 1" in capsys.readouterr().err


def test_the_cluster_names_what_is_no_variable_and_prints_fresh_secrets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["cluster", "--state", str(tmp_path), "--set", "NODE_CONCURRENCY"]) == 2
    assert "--set NODE_CONCURRENCY: write NAME=VALUE" in capsys.readouterr().err
    printed = []
    for _ in range(2):
        assert main(["cluster", "--state", str(tmp_path), "--new-secrets"]) == 0
        printed.append(dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines()))
    assert printed[0].keys() == printed[1].keys() != set()
    assert not set(printed[0].values()) & set(printed[1].values())


def test_secrets_are_completed_in_a_file_of_its_owners_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / ".env"
    file.write_text("REDIS_PASSWORD=kept\nPOSTGRES_PASSWORD=\n")  # as copied from .env.example, in part
    file.chmod(0o644)
    for _ in range(2):
        assert main(["cluster", "--new-secrets", str(file)]) == 0
    lines = file.read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines)
    assert found["REDIS_PASSWORD"] == "kept"
    assert all(found.values())
    assert len(lines) == len(found) + 1  # the empty one stays where it is
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["cluster", "--new-secrets", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
