"""Secrets on their way to the processes that train."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import USERLAND, spec_for

from saturn_airflow import HParams, InvalidSweepError, Job, Secret
from saturn_airflow.launch import fork_server, handed_over, runs
from saturn_airflow.launch.handed_over import HandedOver
from saturn_airflow.model.errors import JobError
from saturn_airflow.training import pyfunc
from saturn_airflow.training.exports import load_exported
from saturn_airflow.training.optim import plain_values

# What JSON, Python and URLs each write in their own way; and a word of the protocol.
PASSWORD = "so $ecret/\"as\" ü\n'nothing' \\ else"
REFERENCE = Secret("shop_db", "password")
CONNECTION = json.dumps({"conn_type": "postgres", "password": PASSWORD})
HANDED = HandedOver(
    {("shop_db", "password"): PASSWORD, ("shop_db", "host"): "finished"},
    {"shop_db": CONNECTION},
    (PASSWORD, "finished", "status"),
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def job(tmp_path: Path, **model_args: Any) -> Job:
    return Job(
        "has secrets",
        load_model="secret_jobs:linear",
        load_dataloader="secret_jobs:noise",
        loss_function="small_jobs:squared",
        model_args={
            "write_to": str(tmp_path / "seen"),
            "secret": Secret("shop_db", "password"),
            **model_args,
        },
        data_args={"secret": Secret("shop_db", "host")},
        hparams=HParams(batches=2),
        connections=["shop_db"],
    )


def files_with(folder: Path, text: str) -> list[str]:
    """Files below ``folder`` that have ``text`` as it is or as JSON or Python write it."""
    forms = [form.encode() for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1])]
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(form in path.read_bytes() for form in forms)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("forked", [True, False])
def test_secrets_reach_ranks_and_nothing_else(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forked:
        monkeypatch.setattr(fork_server, "start", lambda *_: None)
    run = runs.start(spec_for(tmp_path, job(tmp_path, kill_once=True)), HANDED)
    *events, end = run.events()
    assert end["status"] == "finished", end
    assert [event for event in events if event["event"] == "restarting"], "a rank was killed"
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) >= 2
    for one in seen:
        assert one["digest"] == digest(PASSWORD), "the supervisor has it for a rank that it starts again"
        assert one["in_processes"] == []
        assert one["connections"] == {"AIRFLOW_CONN_SHOP_DB": digest(CONNECTION)}
    assert "printed: ***" in run.log.read_text()
    assert "of an error: ***" in run.log.read_text()
    assert files_with(tmp_path, PASSWORD) == []
    model = Path(end["result"]["model"])
    assert json.loads((model / "job.json").read_text())["model_args"]["secret"] == REFERENCE
    with pytest.raises(
        InvalidSweepError, match=r"model_args\.secret is the password of connection 'shop_db'"
    ):
        load_exported(model)
    with pytest.raises(ValueError, match="has a secret among its model_args"):
        pyfunc._load_pyfunc(str(model))
    monkeypatch.syspath_prepend(str(USERLAND))
    assert load_exported(model, model_args={"secret": PASSWORD}).training is False


@pytest.mark.ranks
def test_what_a_job_remembers_is_kept_without_its_secrets(tmp_path: Path) -> None:
    """Objects, dictionaries and lists of a model, and a global, hold the password and change.

    All of it goes on behind a kill, from checkpoints that have references in its place.
    """
    made = Job(
        "asks",
        load_model="secret_jobs:asking",
        load_dataloader="small_jobs:noise",
        loss_function="small_jobs:squared",
        model_args={"write_to": str(tmp_path / "seen"), "secret": REFERENCE},
        hparams=HParams(batches=40),
    )
    end = runs.start(spec_for(tmp_path, made, checkpoint_seconds=0.0), HANDED).wait()
    assert end["status"] == "finished", end
    rows = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    kept = digest(PASSWORD), digest(f"db://ann:{PASSWORD}@host"), digest(f"{PASSWORD} again")
    assert {tuple(row[3:6]) for row in rows} == {kept}
    counted = [(row[0], row[1], row[2], row[6]) for row in rows]
    last = counted[-1]
    assert len(set(last)) == 1, "all of it went on together"
    assert len(counted) > last[0] >= 40, "it was killed, and went on"
    assert files_with(tmp_path, PASSWORD) == []
    manifests = [path.read_text() for path in tmp_path.rglob("manifest.json")]
    assert any('{"secret": [["shop_db", "password"], " again"]}' in text for text in manifests), "a reference"


@pytest.mark.ranks
def test_errors_do_not_tell_secrets(tmp_path: Path) -> None:
    end = runs.start(spec_for(tmp_path, job(tmp_path, fail=True)), HANDED).wait()
    assert end["status"] == "failed"
    assert "can't log in with '***'" in end["reason"]
    assert files_with(tmp_path, PASSWORD) == []


@pytest.mark.ranks
def test_without_them_a_run_says_what_it_lacks(tmp_path: Path) -> None:
    end = runs.start(spec_for(tmp_path, job(tmp_path))).wait()
    assert end["status"] == "failed"
    assert "data_args.secret is the host" in end["reason"] or "model_args.secret is the" in end["reason"]


def test_what_was_made_before_hides_secrets_too_and_no_image_of_memory_is_left() -> None:
    code = """if True:
        import logging, resource, sys
        from saturn_airflow.launch import handed_over
        early = logging.getLogger("a library")
        early.addHandler(logging.StreamHandler(sys.stdout))
        logging.basicConfig()
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
        handed = handed_over.HandedOver({("a", "password"): "so secret"}, {}, ("so secret",))
        handed_over.receive(handed)
        early.error("it is %s", "so secret")
        print("it is so secret", resource.getrlimit(resource.RLIMIT_CORE)[0], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "it is ***\n"
    assert done.stderr == "ERROR:a library:it is ***\nit is *** 0\n"


def test_texts_are_kept_with_references_of_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_over, "_kept", HANDED)
    for text in (PASSWORD, f"db://{PASSWORD}@host {PASSWORD}", "plain", "stat us"):
        encoded = plain_values.encode({"a": [text, {"b": text}], "n": 1}, "it")
        assert PASSWORD not in json.dumps(encoded, ensure_ascii=False)
        assert plain_values.decode(json.loads(json.dumps(encoded))) == {"a": [text, {"b": text}], "n": 1}
    for value in ({PASSWORD: 1}, PASSWORD.encode(), json.dumps(PASSWORD), "its status"):
        with pytest.raises(JobError, match="which no checkpoint may hold"):
            plain_values.encode([value], "it")
    encoded = plain_values.encode(PASSWORD, "it")
    monkeypatch.setattr(handed_over, "_kept", HandedOver({("shop_db", "password"): "a new one"}))
    assert plain_values.decode(encoded) == "a new one", "the value that it has by now"
    monkeypatch.setattr(handed_over, "_kept", handed_over.NOTHING)
    with pytest.raises(JobError, match="password of connection 'shop_db'"):
        plain_values.decode(encoded)


def test_what_is_said_deep_in_an_event_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_over, "_kept", HANDED)
    told = {"result": {"reason": PASSWORD, "tries": [{"why": [PASSWORD]}], "model": "finished"}}
    hidden = {"result": {"reason": "***", "tries": [{"why": ["***"]}], "model": "finished"}}
    assert handed_over.hidden_event({**told, "verdict": PASSWORD}) == {**hidden, "verdict": "***"}


def test_what_programs_read_of_an_event_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_over, "_kept", HANDED)
    event = {"event": "end", "status": "finished", "reason": "finished", "params": {"a": PASSWORD}}
    hidden = {"event": "end", "status": "finished", "reason": "***", "params": {"a": "***"}}
    assert handed_over.hidden_event(event) == hidden


def test_the_file_is_in_memory_and_closed() -> None:
    large = HandedOver({("a", "b"): "x" * 1_000_000})
    with handed_over.as_file(large) as (file,):
        assert "memfd" in os.readlink(f"/proc/self/fd/{file}")
        assert handed_over.read([os.dup(file)]) == HandedOver(large.values, {}, [])
    with handed_over.as_file(handed_over.NOTHING) as files:
        assert files == []
    assert handed_over.read([]) == handed_over.NOTHING
    assert "xxx" not in repr(large)
