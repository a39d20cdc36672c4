"""The page of the cluster: what runs where, what is to come, and no names of what one may not read."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import HOSTILE, hostile  # type: ignore[attr-defined]
from playwright.sync_api import expect

from saturn_airflow import Job
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.folders import OF_SWEEPS, slug
from saturn_airflow.model.past_errors import PastError
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedJob, SharedSweep
from saturn_airflow.planning.online.error_law import fit
from saturn_airflow.plugin.cluster_page import cluster_page

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
OVER = ("success", "failed", "skipped", "upstream_failed")
NODES = (Node("gpu-a", 8, "a100"), Node("gpu-b", 4, "a100"))


def active(dag: str, jobs: dict[str, tuple[float, str]], **facts: object) -> ActiveSweep:
    """A sweep of jobs that take so many seconds on one device, each bound to a node."""
    planned = tuple(
        SharedJob(
            PlannedJob(
                name,
                tuple(
                    Option("ddp" if w > 1 else "single", w, {"a100": 30 + seconds / w**0.9}, 30)
                    for w in (1, 2, 4)
                ),
                (node,),
            )
        )
        for name, (seconds, node) in jobs.items()
    )
    own: dict[str, object] = {"arrived": time.time() - 600, "alone": 3600.0, **facts}
    return ActiveSweep(
        dag_id=dag,
        run_id="night",
        folder=f"sweeps/{dag}/night/sweep",
        made=time.time() - 600,
        nodes=NODES,
        sweep=SharedSweep(f"{dag}/night/sweep", planned, **own),  # type: ignore[arg-type]
    )


def let_run(home: Path, sweep: ActiveSweep, job: str, devices: list[int], share: float) -> object:
    """Leave what a run writes that is alive; its lock."""
    node = next(one.job.nodes[0] for one in sweep.sweep.jobs if one.name == job and one.job.nodes)
    state = home / sweep.folder / slug(job, OF_SWEEPS)
    folder = state / "runs" / "1"
    folder.mkdir(parents=True)
    technique = "ddp" if len(devices) > 1 else "single"
    spec = RunSpec(
        job=Job(job, load_model="shop:model", load_dataloader="shop:data", loss_function="shop:loss"),
        technique=technique,
        devices=len(devices),
        folder=str(state),
        node=node,
        kind="a100",
        slots=8,
    )
    (folder / "spec.json").write_text(json.dumps(spec.to_dict()))
    began = time.time() - 500
    events = [
        {"event": "leased", "time": began, "devices": devices, "technique": technique, "names": []},
        {"event": "start", "time": began, "step": 0, "total_batches": 1000, "batches_per_epoch": 100},
        {
            "event": "step",
            "time": began,
            "step": int(1000 * share),
            "seconds": 0.5,
            "epoch": 0,
            "loss": 1.0,
        },
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    alive = open(folder / "alive", "w")  # noqa: SIM115
    fcntl.flock(alive, fcntl.LOCK_EX)
    return alive


@pytest.fixture(scope="module")
def cluster(site: Any) -> Iterator[None]:
    # Who plans forgets sweeps whose DAG runs Airflow does not know, and these are such.
    site.wait(lambda tasks: all(tasks[f"{sweep}.plan"] in OVER for sweep in ("steady", "troubled")))
    home = Path(site.services.environment["AIRFLOW__SATURN__HOME"])
    large = active("large", {f"gpt2-lr{n}": (3000 + 900 * n, "gpu-a") for n in range(7)}, preempt=True)
    urgent = active("nights", {"small": (600, "gpu-a"), "medium": (1500, "gpu-b")}, priority=5.0)
    secret = active("secret", {"hidden-job": (5000, "gpu-b"), "hidden-too": (900, "gpu-b")})
    # Its DAG run has ended, as Airflow knows, without a word to the ledger.
    over = dataclasses.replace(active("nights", {"old": (600, "gpu-a")}), run_id="night-1")
    over = dataclasses.replace(over, sweep=dataclasses.replace(over.sweep, name="nights/night-1/sweep"))
    measured = active(
        "watched_sweep", {"vit ddp 1 gpu-a": (60, "gpu-a"), "vit ddp 2 gpu-a": (60, "gpu-a")}, trials=True
    )
    measured = dataclasses.replace(measured, folder=f"{measured.folder}/trials")
    sweeps = (large, urgent, secret, over, measured)
    with ExitStack() as locks:
        for sweep in sweeps:
            Ledger(home).write(sweep)
        locks.enter_context(let_run(home, large, "gpt2-lr0", [0, 1, 2, 3], 0.6))  # type: ignore[arg-type]
        locks.enter_context(let_run(home, large, "gpt2-lr1", [4, 5], 0.3))  # type: ignore[arg-type]
        locks.enter_context(let_run(home, large, "gpt2-lr2", [6], 0.2))  # type: ignore[arg-type]
        locks.enter_context(let_run(home, secret, "hidden-job", [0, 1, 2, 3], 0.5))  # type: ignore[arg-type]
        locks.enter_context(let_run(home, measured, "vit ddp 1 gpu-a", [7], 0.5))  # type: ignore[arg-type]
        yield
        for sweep in sweeps:
            Ledger(home).remove(sweep.key)


def test_what_runs_and_what_is_to_come_is_shown(site: Any, visit: Any, cluster: None) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/saturn/cluster")
    rows = page.locator("#sweeps tbody tr")
    expect(rows.filter(has_text="nights · sweep")).to_have_count(1)
    expect(rows.filter(has_text="secret · sweep")).to_have_count(1)
    expect(rows.filter(has_text="large · sweep")).to_contain_text("its priority is 5, and 0 here")
    expect(rows.filter(has_text="watched_sweep · sweep")).to_contain_text("of its trials; what its jobs want")
    expect(page.locator("#chart canvas")).to_be_visible()
    for width, scheme in ((1400, "light"), (800, "dark"), (420, "light")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        visitor.shoot(f"cluster-{width}-{scheme}", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")


def test_of_dags_of_others_no_name_is_told(site: Any, visit: Any, cluster: None) -> None:
    answer = site.client("victor").get("/saturn/data/cluster")
    assert answer.status_code == 200
    assert "secret" not in answer.text
    assert "hidden" not in answer.text
    busy = [bar for job in answer.json()["jobs"] for bar in job["bars"] if bar["node"] == "gpu-b"]
    assert [0, 1, 2, 3] in [bar["device_ids"] for bar in busy if bar["actual"]], "that they are busy is told"
    assert "hidden-job" in site.client("ada").get("/saturn/data/cluster").text


def test_names_stay_names(site: Any, visit: Any, cluster: None) -> None:
    """Of a run, a task, jobs and of who goes before; in the table, the chart and its tips."""
    home = Path(site.services.environment["AIRFLOW__SATURN__HOME"])
    # A run that Airflow knows has ended there, and what has ended is left out.
    run_id, task = f"{hostile().run_id} again", HOSTILE[1]
    names = [name for name in HOSTILE if name.isprintable()]  # jobs of others are refused
    jobs = {name: (2000.0 + 100 * number, "gpu-b") for number, name in enumerate(names)}
    made = active("hostile", jobs, priority=9.0)
    own = dataclasses.replace(made.sweep, name=f"hostile/{run_id}/{task}")
    sweep = dataclasses.replace(made, run_id=run_id, sweep=own, folder="sweeps/hostile/a/sweep")
    Ledger(home).write(sweep)
    try:
        page = visit().page
        page.goto("/saturn/cluster")
        # The answer is made anew every ten seconds, and the page asks as often.
        row = page.locator("#sweeps tbody tr").filter(has_text=f"hostile · {task}")
        expect(row).to_contain_text(run_id)
        rows = page.locator("#sweeps tbody tr").filter(has_text="secret · sweep")
        expect(rows).to_contain_text(f"hostile/{run_id}/{task}: ")
        assert _tips(page) & set(HOSTILE)
        assert page.locator("img[src=x], svg[onload], [onmouseover], [onerror]").count() == 0
        scripts = page.evaluate("[...document.scripts].map(script => script.src)")
        assert all(source.startswith(f"{site.url}/saturn/static/") for source in scripts)
        assert page.evaluate("Object.keys(Object.prototype)") == [], "of a name __proto__"
        address = re.compile(r"^/saturn/plan/hostile/%3C%2Ftitle%3E%3Cscript%3E[\w%()?=]*$")
        expect(row.get_by_role("link")).to_have_attribute("href", address)
    finally:
        Ledger(home).remove(sweep.key)


def _tips(page: Any) -> set[str]:
    """Names that the chart's tips show, looked for until there is one of a hostile name."""
    seen: set[str] = set()
    deadline = time.monotonic() + 300
    while not seen & set(HOSTILE) and time.monotonic() < deadline:
        box = page.locator("#chart").bounding_box()
        for x in range(5, int(box["width"]), 40):
            for y in range(5, int(box["height"]), 12):
                page.locator("#chart").hover(position={"x": x, "y": y}, force=True)
                if page.locator(".tip strong").is_visible():
                    seen.add(page.locator(".tip strong").text_content())
    return seen


def test_by_when_sweeps_are_done_with_odds_is_told_of_those_that_know(tmp_path: Path) -> None:
    law = fit([PastError(f"s{n % 3}", f"j{n}", 1 + 0.05 * (n % 5), "n") for n in range(12)]).to_dict()
    known = dataclasses.replace(active("known", {"small": (600, "gpu-a")}), law=law)
    for sweep in (known, active("unknown", {"large": (3000, "gpu-a")})):
        Ledger(tmp_path).write(sweep)
    readable = {"known", "unknown"}
    shown = cluster_page(tmp_path, time.time(), readable, lambda runs: set())
    told = {one["dag_id"]: one for one in shown["sweeps"]}
    assert told["known"]["by"] > told["known"]["end"]
    assert told["unknown"]["by"] is None
    by = {job["name"]: (job["by"], job["bars"][-1]["planned"][1]) for job in shown["jobs"]}
    assert by["small"][0] > by["small"][1]
    assert by["large"][0] is None
    shown = cluster_page(tmp_path, time.time(), readable, lambda runs: {("unknown", "night")} & runs)
    assert [one["dag_id"] for one in shown["sweeps"]] == ["known"]


def test_who_breaks_a_deadline_is_told_and_named_to_those_who_may_know_it(tmp_path: Path) -> None:
    late = time.time() + 3600  # alone it takes 2932
    due = active("due", {"a": (5000, "gpu-b"), "b": (5000, "gpu-b")}, deadline=late)
    urgent = active("urgent", {f"j{n}": (9000, "gpu-b") for n in range(4)}, priority=5.0)
    for sweep in (due, urgent):
        Ledger(tmp_path).write(sweep)
    pages = [
        cluster_page(tmp_path, time.time(), readable, lambda runs: set())
        for readable in ({"due", "urgent"}, {"due"}, {"urgent"}, set[str]())
    ]
    told = [{one["dag_id"]: (one["broken_by"], one["breaks"]) for one in page["sweeps"]} for page in pages]
    assert told[0]["due"] == (["urgent/night/sweep"], [])
    assert told[0]["urgent"] == ([], ["due/night/sweep"])
    assert told[1]["due"] == (["another sweep"], [])
    assert told[1][None] == ([], [])
    assert told[2]["urgent"] == ([], ["another sweep"])
    assert "urgent" not in json.dumps(pages[1])
    assert "due" not in json.dumps(pages[2])


def test_the_list_of_sweeps_leads_there(site: Any, visit: Any) -> None:
    page = visit().page
    page.goto("/saturn/sweeps")
    page.get_by_role("link", name="Cluster").click()
    expect(page.get_by_role("heading", name="Cluster")).to_be_visible()
