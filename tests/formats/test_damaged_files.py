"""Whatever is in a file that the product reads, it is read, or refused in one message that names it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import fuzz, one_message, refused, tried
from safetensors.torch import save
from whole_files import ARRIVALS, FIELDS, JOB, LEDGER, MANIFEST, OF_A_TRIAL, PLAN, PROBLEM, SEEN, SPEC, TRIAL

from saturn_airflow import Job, Node
from saturn_airflow.deployment import survey
from saturn_airflow.deployment.compose import load as load_compose
from saturn_airflow.deployment.processes import Processes
from saturn_airflow.launch import checkpoint_files, progress, restarting, runs, whereabouts
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.launch.run_spec import RunSpec, read_spec
from saturn_airflow.model import json_text
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.node_memory import NodeMemory
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.sharing import SharingRules
from saturn_airflow.operators import drains, first_weights, inventory, measuring, memory_records
from saturn_airflow.operators.printed import OutputReader
from saturn_airflow.planning.presenting.plan_files import read_plan
from saturn_airflow.profiling import measure
from saturn_airflow.sharing.arrivals_file import ArrivalsFile
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.tracking import error_history, estimate_observations, estimate_store, sweep_runs
from saturn_airflow.tracking.outbox import Outbox
from saturn_airflow.training import loading_weights
from saturn_airflow.training.exports import load_exported
from saturn_airflow.training.guarding import kept_steps
from saturn_airflow.training.guarding.first_steps import PlainSteps
from saturn_airflow.training.guarding.verdicts import Verdicts
from saturn_airflow.training.trainers import whole_checkpoints


def test_what_is_whole_is_read(tmp_path: Path) -> None:
    for name, valid in (("spec", SPEC), ("plan", PLAN), ("arrivals", ARRIVALS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(valid))
    assert read_spec(tmp_path).job == JOB
    assert read_plan(tmp_path / "plan.json").makespan == 5.0
    assert ArrivalsFile.read(tmp_path / "arrivals.json").sweeps


@pytest.mark.slow
@fuzz(SPEC)
def test_spec_of_a_run(content: bytes) -> None:
    with one_message("spec") as folder:
        (folder / "spec.json").write_bytes(content)
        assert isinstance(read_spec(folder), RunSpec)


EVENTS: list[dict[str, Any]] = [
    {"event": "format", "format": 1},
    {"event": "leased", "devices": ["0"], "technique": "ddp"},
    {"event": "start", "step": 0, "total_batches": 9, "batches_per_epoch": 3},
    *({"event": "step", "step": n, "epoch": 0, "loss": 0.5, "seconds": 1.0} for n in range(1, 9)),
    {"event": "end", "status": "finished", "reason": None, "traceback": "", "result": {}},
]


@pytest.mark.slow
@fuzz(EVENTS[2])
def test_events(content: bytes) -> None:
    lines = [json.dumps({**event, "time": 1.0 * n}).encode() for n, event in enumerate(EVENTS)]
    for at in (1, 6, len(lines) - 1):
        with one_message("events") as folder:
            run = folder / "runs" / "0001"
            run.mkdir(parents=True)
            (run / "spec.json").write_text(json.dumps(SPEC))
            (run / "alive").touch()
            # As a crash leaves it: bytes of anything where a line was.
            hurt = b"\x00" + content.replace(b"\n", b" ")
            said = [*lines[:at], hurt, *lines[at + 1 :]]
            (run / "events.jsonl").write_bytes(b"\n".join(said) + b"\n")
            heard = [event["time"] for event in runs.Run(run).so_far()]
            assert heard == [float(n) for n in range(1, len(lines)) if n != at]
            end = runs.Run(run).end
            assert end is not None
            assert end["status"] == ("lost" if at == len(lines) - 1 else "finished")
            assert progress.of(folder).steps == 8
            assert whereabouts.of(folder).share >= 8 / 9


@pytest.mark.slow
@fuzz(OF_A_TRIAL)
def test_what_a_trial_said(content: bytes) -> None:
    with one_message("trial") as folder, pytest.MonkeyPatch.context() as patch:
        run = folder / "runs" / "0001"
        run.mkdir(parents=True)
        (run / "spec.json").write_text(json.dumps(SPEC))
        (run / "alive").touch()
        lines = [content.replace(b"\n", b" ")]
        with contextlib.suppress(ValueError):
            said = json_text.parse(content)
            lines = [json.dumps(event).encode() for event in said] if isinstance(said, list) else lines
        (run / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        patch.setattr(measure.runs, "start", lambda *_: runs.Run(run))  # type: ignore[attr-defined]
        patch.setattr(time, "sleep", lambda seconds: None)
        ready = {"folder": folder, "plain_steps": folder, "holder": "h", "priority": (0.0, 0)}
        found = measure.measure(TRIAL, Node("n", 2, kind="cpu"), **ready)  # type: ignore[arg-type]
        found.check()
        assert found.key == ("f", "ddp", 1, "cpu")


@pytest.mark.slow
@fuzz(Node("n", 2, kind="cpu").to_dict())
def test_cards_of_nodes(content: bytes) -> None:
    with one_message("cards") as folder:
        inventory.announce(Node("whole", 1))
        (folder / "nodes" / "n.json").write_bytes(content)
        assert all(isinstance(node, Node) for node in inventory.announced_nodes())


@pytest.mark.slow
@fuzz({"gpu-a": 4})
def test_record_of_pools(content: bytes) -> None:
    with one_message("pools") as folder:
        (folder / "pools.json").write_bytes(content)
        assert isinstance(inventory.recorded_pools(), dict)


@fuzz({"reason": "a new fan", "format": 1})
def test_drains(content: bytes) -> None:
    with one_message("drains") as folder:
        (folder / "drained").mkdir()
        (folder / "drained" / "n.json").write_bytes(content)
        assert set(drains.drained()) == {"n"}


@pytest.mark.slow
@fuzz(NodeMemory(node="n", devices=2, seen=1.0, limits={"machine": 8.0, "group": 4.0}).to_dict())
def test_memory_of_nodes(content: bytes) -> None:
    with one_message("memory of nodes") as folder:
        memory_records.record(Node("whole", 1))
        (folder / "memory" / "n.json").write_bytes(content)
        found = memory_records.learned()
        assert found["whole"] > 0
        assert all(0 <= most < math.inf for most in found.values())


@pytest.mark.slow
@fuzz({"wish": "scratch", "format": 1, "time": 1.0})
def test_wishes(content: bytes) -> None:
    with one_message("wishes") as folder:
        restarting.ask_for(folder, restarting.FROM_SCRATCH)
        (path,) = folder.iterdir()
        assert restarting.wish_of(folder) == restarting.FROM_SCRATCH
        path.write_bytes(content)
        assert restarting.wish_of(folder) in (None, restarting.FROM_SCRATCH, restarting.GO_ON)


@fuzz({"kind": "metric", "name": "loss", "value": 0.5})
def test_an_outbox(content: bytes) -> None:
    with one_message("outbox") as folder:
        box = Outbox(folder)
        box.append({"kind": "tag", "name": "first"})
        with (box.folder / "outbox.jsonl").open("ab") as file:
            file.write(content + b"\n")
        box.append({"kind": "tag", "name": "last"})
        records = [record for record, _ in box.read(0)]
        assert records[0]["name"] == "first"
        assert records[-1]["name"] == "last", "what is valid beside it stays"
        assert box.last("tag", "first") is not None
        (box.folder / "sent.json").write_bytes(content)
        assert isinstance(box.state(), dict)


@fuzz(PLAN)
def test_a_plan(content: bytes) -> None:
    with one_message("plan") as folder:
        (folder / "plan.json").write_bytes(content)
        read_plan(folder / "plan.json")


@fuzz(ARRIVALS)
def test_arrivals(content: bytes) -> None:
    with one_message("arrivals") as folder:
        (folder / "arrivals.json").write_bytes(content)
        ArrivalsFile.read(folder / "arrivals.json")


@fuzz(PROBLEM)
def test_a_problem(content: bytes) -> None:
    with one_message("problem") as folder:
        (folder / "problem.json").write_bytes(content)
        assert Problem.read(folder / "problem.json").jobs


@pytest.mark.slow
@fuzz(MANIFEST)
def test_manifest_of_a_checkpoint(content: bytes) -> None:
    with one_message("manifest") as folder:
        for step in (4, 8):
            (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        whole = {**MANIFEST, "step": 4, "files": {}}
        (folder / "checkpoints" / "step-4" / "manifest.json").write_text(
            json.dumps({**whole, "sha256": checkpoint_files.digest_of(whole)})
        )
        newest = folder / "checkpoints" / "step-8" / "manifest.json"
        newest.write_bytes(content)
        assert checkpoint_files.damage(newest.parent) is not None
        assert checkpoint_files.damage(newest.parent.with_name("step-4")) is None
        decided = restarting.decide(folder, Definition(FIELDS), restarting.Asker(1.0))
        assert decided.definition.fields == FIELDS


@pytest.mark.slow
@fuzz({"attempt": 5.0, "try_number": 2, "wanted": True})
def test_conclusion_of_a_run(content: bytes) -> None:
    with one_message("conclusion") as folder:
        run = folder / "runs" / "0001"
        run.mkdir(parents=True)
        (run / "spec.json").write_text(json.dumps(SPEC))
        (run / "concluded.json").write_bytes(content)
        assert restarting.Asker(5.0, 3).goes_on_with(runs.Run(run)) in (True, False)
        assert restarting.was_cleared(folder, [5.0]) in (True, False)


@fuzz({"run_id": "r", "fingerprints": ["f"], "since": 1e12})
def test_note_of_who_measures(content: bytes) -> None:
    with one_message("measuring") as folder:
        (folder / "other.json").write_bytes(content)
        note = measuring.read_note(folder / "other.json")
        assert note is None or {*map(type, note.values())} == {str, set, float}


@fuzz({"models:/a@b": "models:/a/3", "models:/c@d": None})
def test_settled_weights(content: bytes) -> None:
    with one_message("settled") as folder:
        (folder / "settled.json").write_bytes(content)
        known = first_weights.known(folder / "settled.json")
        assert all(isinstance(version, str | None) for version in known.values())


@fuzz(JOB.to_dict())
def test_an_exported_job(content: bytes) -> None:
    with one_message("export") as folder:
        (folder / "model.safetensors").touch()
        (folder / "job.json").write_bytes(content)
        load_exported(folder, allowed_modules=["nowhere"])


@pytest.mark.slow
@fuzz({"format": 1, "files": {}, "metrics": {}, "definition": {"fields": FIELDS}, "arguments": {}})
def test_checkpoint_of_a_trainer(content: bytes) -> None:
    with one_message("trainer"), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in (4, 8):
            (folder / f"checkpoint-{step}").mkdir()
            whole_checkpoints.write_manifest(folder / f"checkpoint-{step}", {"metrics": {}})
        (folder / "checkpoint-8" / whole_checkpoints.MANIFEST).write_bytes(content)
        found = whole_checkpoints.newest(folder, lambda warning: None)
        assert found is not None
        assert found[0].name in ("checkpoint-4", "checkpoint-8")


@fuzz(JOB.to_dict())
def test_a_job(content: bytes) -> None:
    with one_message("job"):
        try:
            data = json_text.parse(content)
        except ValueError:
            return
        assert isinstance(Job.from_dict(data), Job)


@pytest.mark.slow
@fuzz(LEDGER.to_dict())
def test_a_sweep_in_the_ledger(content: bytes) -> None:
    with one_message("ledger") as folder:
        ledger = Ledger(folder)
        ledger.write(dataclasses.replace(LEDGER, run_id="whole"))
        (folder / "sweeps" / ".active" / "0.json").write_bytes(content)
        sweep_runs = ledger.sweeps()
        assert "whole" in [sweep.run_id for sweep in sweep_runs], "what is valid beside it stays"
        cluster = ledger.cluster(sweep_runs, now=2.0)
        assert plan_together(cluster, SharingRules()).sweeps


@pytest.mark.parametrize("folder", ["/etc", "sweeps/../../other", "../other", "sweeps/" + "a" * 300])
def test_a_sweep_in_the_ledger_leads_nowhere_else(folder: str) -> None:
    with pytest.raises(ValueError, match="is no folder of a sweep"):
        ActiveSweep.from_dict({**LEDGER.to_dict(), "folder": folder}, "here")
    assert ActiveSweep.from_dict(LEDGER.to_dict(), "here") == LEDGER


@pytest.mark.slow
@fuzz("9" * 12)
def test_notes_of_how_far_was_read(content: bytes) -> None:
    with one_message("followed") as folder:
        run = folder / "runs" / "0001"
        run.mkdir(parents=True)
        (run / "spec.json").write_text(json.dumps(SPEC))
        lines = [json.dumps({**event, "time": 1.0 * n}) for n, event in enumerate(EVENTS)]
        (run / "events.jsonl").write_text("\n".join(lines) + "\n")
        for name in ("followed", "alive", "host"):
            (run / name).write_bytes(content)
        followed = runs.Run(run)
        followed.read_on()
        ended = followed.offset == (run / "events.jsonl").stat().st_size
        told = [event["event"] for event in followed.events()]
        assert ended or (told and told[-1] == "end"), "its end must not be missed"
        assert followed._pid() is None
        followed.kill()
        (run / "output.log").write_text("one\n")
        (run / "printed").write_bytes(content)
        printed: list[str] = []
        reader = OutputReader(run / "output.log", printed.append)
        with (run / "output.log").open("a") as file:
            file.write("two\n")
        reader.look()
        assert printed[-1:] == ["two"], "what is printed from now on is told"


@pytest.mark.slow
@fuzz({"gpt2 ddp 2 {}": "ok"})
def test_verdicts(content: bytes) -> None:
    with one_message("verdicts") as folder:
        (folder / "verdicts.json").write_bytes(content)
        kept = Verdicts(folder)
        assert isinstance(kept.get("gpt2 ddp 2 {}"), str | None)
        kept.set("other", "refused")
        assert kept.get("other") == "refused"


@fuzz({"steps": []})
def test_plain_steps(content: bytes) -> None:
    with one_message("plain steps"):
        whole = kept_steps.dumped(PlainSteps(sizes=(2, 3), device="cpu"))
        assert kept_steps.loaded(whole) is not None
        at = len(content)
        for written in {content, whole[:at], whole[:at] + content + whole[2 * at :]} - {whole}:
            assert kept_steps.loaded(written) is None


@fuzz({"checkpoints": ["step-4"], "why": "there was no room"})
def test_note_of_what_was_removed(content: bytes) -> None:
    with one_message("removed") as folder:
        (folder / checkpoint_files.NOTE).write_bytes(content)
        assert isinstance(checkpoint_files.why_removed(folder), str | None)


@fuzz({"gpu-a": "word"})
def test_marks_of_the_doctor(content: bytes) -> None:
    with one_message("marks") as folder:
        survey.leave_mark(folder, "whole", "here")
        (folder / "doctor" / "other.mark").write_bytes(content)
        assert survey.marks(folder)["whole"] == "here"


@fuzz("123 4567")
def test_notes_of_services(content: bytes) -> None:
    with one_message("services") as folder:
        (folder / "redis.pid").write_bytes(content)
        Processes(folder).end_marked("redis")


@pytest.mark.slow
@fuzz({"services": {"a": {"image": "i:1", "command": ["c"], "healthcheck": {"test": ["CMD", "x"]}}}})
def test_a_compose_file(content: bytes) -> None:
    with one_message("compose") as folder:
        (folder / "compose.yaml").write_bytes(content)
        assert isinstance(load_compose(folder / "compose.yaml", {}), dict)


@fuzz(SEEN)
def test_estimates_in_mlflow(content: bytes) -> None:
    with one_message("estimates"):
        text = content.decode(errors="replace")
        found = [
            estimate_observations.read(one, None, "n") for one in (json.dumps(SEEN), text, json.dumps(SEEN))
        ]
        seen = [one for one in found if one is not None]
        assert len(seen) >= 2
        assert estimate_observations._time_of(text) is not None
        combined = estimate_store._combined(seen, forgetful=False)
        assert combined is not None
        combined.check()
        estimate_store._as_training_had_it({combined.key: combined}, {combined.key: seen})


@fuzz({"fresh": True, "nodes": ["n"], "errors": [[0, 0.1, 5.0]]})
def test_errors_of_earlier_sweeps(content: bytes) -> None:
    with one_message("past errors"), pytest.MonkeyPatch.context() as patch:
        whole = json.dumps({"fresh": True, "nodes": ["n"], "errors": [[0, 0.1, 5.0]]})
        tagged = [("d/1/s", content.decode(errors="replace")), ("d/2/s", whole)]
        patch.setattr(sweep_runs, "tagged", lambda *_: tagged)
        assert error_history.find("unused")[-1].sweep == "d/2/s"


@fuzz({"jobs": [{"job": "a", "status": "failed", "reason": "why"}]})
def test_the_report_of_a_sweep(content: bytes) -> None:
    with one_message("report"):
        assert all(
            sweep_runs._untrained(told)["metrics"] == {} for told in sweep_runs._outcomes_in(content, "r")
        )


@pytest.mark.slow
@fuzz({"weight": [1.0, 2.0]})
def test_weights_of_models(content: bytes) -> None:
    # A header with its length before it, as the format has it; and nothing of the kind.
    valid = save({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    cut = len(content) % len(valid)
    for written in (content, valid[:cut], valid[:cut] + content + valid[cut + len(content) :]):
        with one_message("weights") as folder:
            (folder / "model.safetensors").write_bytes(written)
            (folder / "job.json").write_text(json.dumps({**JOB.to_dict(), "load_model": "damaged_model:net"}))
            (folder / "damaged_model.py").write_text(
                "import torch\nnet = lambda layers: torch.nn.Linear(2, 2)"
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "path", [str(folder), *sys.path])
                load_exported(folder)
        with one_message("first weights") as folder:
            (folder / "model.safetensors").write_bytes(written)
            starts = dataclasses.replace(JOB, init_from=str(folder / "model.safetensors"))
            loading_weights.start_from(torch.nn.Linear(2, 2), starts, str(folder / "model.safetensors"))


def test_how_many(figure: Callable[[str], None]) -> None:
    if path := os.environ.get("SATURN_FUZZ_RESULTS"):
        counts = {name: {"tried": count, "refused": refused[name]} for name, count in tried.items()}
        Path(path).write_text(json.dumps(counts))
    figure(f"{sum(tried.values())} damaged inputs: " + ", ".join(f"{k} {n}" for k, n in tried.items()))
