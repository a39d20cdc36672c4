"""What the plan page makes of tasks and XComs, without an Airflow."""

from __future__ import annotations

from typing import Any

import pytest
from record import MADE, Run, finished, on

from saturn_airflow.plugin.choice import job_choice
from saturn_airflow.plugin.listing import listed
from saturn_airflow.plugin.overview import sweep_state
from saturn_airflow.plugin.queries import Record


def test_planned_seconds_count_from_the_plan() -> None:
    """Also where its first job waited for devices of another sweep, as planned."""
    run = Run()
    run.plan(on("first", 5, 55), on("second", 55, 95))
    run.train(0, "success", "first", **finished(1010, 1070))
    run.train(1, "running", "second", start=1012)
    page = run.page()
    first, second = page["jobs"]
    assert page["origin"] == MADE
    assert (first["bars"][0]["planned"], first["bars"][0]["actual"]) == ([5, 55], [10, 70])
    # Its task began long before its device was free.
    assert (second["bars"][0]["planned"], second["bars"][0]["actual"]) == ([55, 95], [70, 100])
    assert second["status"] == "running"
    assert page["totals"]["expected"] == 110


def test_nodes_that_take_no_part_are_told_with_the_reason() -> None:
    run = Run()
    assert run.page()["left_out"] == {}
    run.plan(on("first", 0, 50))
    assert run.page()["left_out"] == {}, "an earlier version did not say"
    run.values["sweep.plan", -1, "plan"]["left_out"] = {"gpu-b": "it is drained"}
    assert run.page()["left_out"] == {"gpu-b": "it is drained"}


def test_a_running_task_whose_device_is_held_waits() -> None:
    run = Run()
    run.plan(on("first", 0, 50), on("second", 50, 90), on("beside", 0, 20, [1]))
    for index, job in enumerate(("beside", "first", "second")):
        run.train(index, "running", job, start=1005)
    statuses = {job["name"]: job["status"] for job in run.page()["jobs"]}
    assert statuses == {"first": "running", "beside": "running", "second": "waiting for devices"}
    assert run.job("second")["bars"][0]["actual"] is None


def test_a_node_whose_clock_is_an_hour_off_has_no_bar_of_an_hour() -> None:
    for start, actual in ((3610, [100, 100]), (-2590, [0, 100])):
        (run := Run()).plan(on("first", 5, 55))
        run.train(0, "running", "first", start=MADE + start)
        assert run.job("first")["bars"][0]["actual"] == actual


def test_a_task_that_has_not_run_is_found_by_its_place_in_the_plan() -> None:
    run = Run()
    run.plan(on("b", 0, 50), on("a", 0, 40, [1]), on("c", 50, 60))
    run.train(0, "success", "a", **finished(1000, 1040))
    run.train(1, None)
    run.train(2, None)
    page = run.page()
    assert {job["name"]: job["task"]["map_index"] for job in page["jobs"]} == {"a": 0, "b": 1, "c": 2}
    assert run.job("c")["status"] == "waiting"


def test_a_job_that_was_tried_again_does_not_lie_over_those_between_its_tries() -> None:
    run = Run("failed")
    run.plan(on("bad", 0, 50), on("good", 50, 90))
    times: dict[str, Any] = {"started_at": 1000, "ended_at": 1062, "actual_seconds": 4}
    run.train(0, "failed", "bad", status="failed", reason="it raises", **times)
    run.train(1, "success", "good", **finished(1002, 1060))
    assert run.job("bad")["bars"][0]["actual"] == [60, 62]
    assert run.job("bad")["actual"] == 4
    assert run.job("good")["bars"][0]["actual"] == [2, 60]


def test_outcomes_of_a_plan_made_before_do_not_count() -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    run.train(0, None)
    run.values["sweep.train", 0, "outcome"] = {"job": "job", "attempt": 1.0, **finished(500, 510)}
    assert run.job("job")["status"] == "waiting"
    assert run.job("job")["bars"][0]["actual"] is None


def test_that_a_jobs_code_was_edited_as_it_trained_is_shown() -> None:
    run = Run("success")
    run.plan(on("a", 0, 50))
    run.train(0, "success", "a", **{**finished(1000, 1010), "mixed": "its code has changed"})
    assert (run.job("a")["status"], run.job("a")["reason"]) == ("finished", "its code has changed")


def test_reasons_of_failed_lost_and_unplanned_jobs() -> None:
    run = Run("failed")
    run.plan(on("bad", 0, 50), on("gone", 50, 90), unplanned=[{"job": "huge", "reason": "fits nowhere"}])
    run.train(
        0, "failed", "bad", status="failed", reason="sample 600 is damaged", started_at=1000, ended_at=1010
    )
    run.train(1, "failed", "gone")
    assert (run.job("bad")["status"], run.job("bad")["reason"]) == ("failed", "sample 600 is damaged")
    assert run.job("gone")["status"] == "lost"
    assert "log" in run.job("gone")["reason"]
    huge = run.job("huge")
    assert (huge["status"], huge["reason"], huge["bars"]) == ("not planned", "fits nowhere", [])
    assert huge["task"]["id"] == "sweep.plan"
    run.task("profile.wave_1", "profile", "failed", 3, name="huge fsdp x 2")
    assert (run.job("huge")["task"]["id"], run.job("huge")["task"]["map_index"]) == (
        "sweep.profile.wave_1",
        3,
    )


def test_a_retry_keeps_what_was_trained_before_it() -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    run.train(0, "up_for_retry", "job", status="stopped", reason="killed", started_at=1000, ended_at=1020)
    assert run.job("job")["status"] == "retrying"
    assert run.job("job")["bars"][0]["actual"] == [0, 20]


def two_rounds() -> Any:
    run = Run()
    run.plan(on("stays", 0, 100), on("moves", 0, 100, [1]), on("loser", 100, 150), prefix="round_1.")
    for index, job in enumerate(("moves", "stays")):
        run.train(
            index,
            "success",
            job,
            "round_1.",
            status="going_on",
            started_at=1000,
            ended_at=1050,
            actual_seconds=50,
        )
    run.train(
        2, "skipped", "loser", "round_1.", status="waiting", reason="its turn did not come in this round"
    )
    run.plan(on("stays", 0, 40), on("moves", 0, 30, (1,), "spill"), prefix="round_2.", made=1052.0)
    return run


def test_a_later_rounds_plan_takes_the_place_of_what_is_left() -> None:
    run = two_rounds()
    run.train(0, "running", "moves", "round_2.", start=1060)
    run.train(1, "running", "stays", "round_2.", start=1056)
    page = run.page()
    assert [round["start"] for round in page["rounds"]] == [0, 52]
    stays, moves, loser = (run.job(name)["bars"] for name in ("stays", "moves", "loser"))
    assert [bar["planned"] for bar in stays] == [[0, 52], [52, 92]]
    # It trained on while the round changed; the other had to be loaded anew.
    assert [bar["actual"] for bar in stays] == [[0, 50], [50, 100]]
    assert [bar["actual"] for bar in moves] == [[0, 50], [60, 100]]
    assert [bar["technique"] for bar in moves] == ["single", "spill"]
    assert loser[0]["planned"] is None


def test_a_job_that_paused_between_rounds_has_a_gap() -> None:
    run = two_rounds()
    run.values["sweep.round_1.train", 1, "outcome"]["status"] = "paused"
    run.train(1, "running", "stays", "round_2.", start=1056)
    assert [bar["actual"] for bar in run.job("stays")["bars"]] == [[0, 50], [56, 100]]


def test_what_an_outcome_says_of_all_rounds_is_counted_once() -> None:
    run = two_rounds()
    run.tasks = [task for task in run.tasks if not task.task_id.startswith("sweep.round_2.train")]
    outcome = {"job": "stays", "attempt": 1052.0, **finished(1000, 1090)}
    run.task("round_2.train", "train", "success", 0, 1056, name="stays", outcome=outcome)
    assert run.job("stays")["actual"] == 90
    assert run.job("stays")["status"] == "finished"


def test_a_job_that_a_later_round_drops_is_pruned() -> None:
    run = two_rounds()
    dropped = {"job": "loser", "attempt": 1052.0, "status": "pruned", "reason": "pruned after 7 batches"}
    run.task("round_2.train", "train", "skipped", 2, name="loser", outcome=dropped)
    assert (run.job("loser")["status"], run.job("loser")["reason"]) == ("pruned", "pruned after 7 batches")


def test_a_job_that_ended_between_two_rounds_is_as_the_report_says() -> None:
    run = two_rounds()
    run.task("report", "report", "success", return_value={"jobs": [{"job": "stays", **finished(1000, 1070)}]})
    run.tasks = [task for task in run.tasks if not task.task_id.startswith("sweep.round_2")]
    assert run.job("stays")["status"] == "finished"
    assert run.job("stays")["bars"][0]["actual"] == [0, 70]


def test_stages_count_the_mapped_tasks_that_have_ended() -> None:
    run = Run()
    run.task("profile.wave_1", "profile", "success", 0)
    run.task("profile.wave_1", "profile", "running", 1)
    run.task("profile.wave_2", "profile", "skipped")
    stages = {stage["name"]: stage for stage in run.page()["stages"]}
    assert stages["trials"] == {"name": "trials", "state": "done", "done": 0, "all": 0, "task": None}
    assert stages["profile"] == {"name": "profile", "state": "running", "done": 1, "all": 2, "task": None}
    assert stages["plan"]["state"] == "waiting"


def test_a_stage_leads_to_the_task_whose_log_says_most() -> None:
    run = Run()

    def found() -> dict[str, Any]:
        return {stage["name"]: stage["task"] for stage in run.page()["stages"]}

    run.task("profile.wave_1", "profile", "success", 0, start=10.0)
    run.task("profile.wave_1", "profile", "success", 1, start=11.0)
    run.task("profile.wave_2", "profile", "skipped", start=12.0)
    run.task("plan", "plan", "success", start=20.0)
    run.task("train.a", "train", "running", 0, start=30.0)
    run.task("train.b", "train", None, 0)
    one = {"map_index": -1, "try_number": 1}
    assert found()["plan"] == {"id": "sweep.plan", **one}
    assert found()["profile"] == {"id": "sweep.profile.wave_1", **one, "map_index": None}, "all of them"
    assert found()["train"] == {"id": "sweep.train.a", **one, "map_index": 0}
    assert found()["report"] is None
    run.task("train.b", "train", "failed", 1, start=25.0)
    assert found()["train"] == {"id": "sweep.train.b", **one, "map_index": 1}


def test_idle_nodes_are_shown_and_utilisation_counts_them() -> None:
    run = Run("success")
    run.plan(on("job", 0, 50, (0, 1)))
    run.train(0, "success", "job", **finished(1000, 1060))
    totals = run.page()["totals"]
    assert run.page()["nodes"] == [{"name": "a", "devices": 2}, {"name": "idle", "devices": 4}]
    assert totals["utilisation"] == pytest.approx(2 / 6)
    assert totals["elapsed"] == 60
    assert totals["expected"] is None


def test_a_plan_without_nodes_shows_the_devices_it_uses() -> None:
    run = Run()
    run.plan(on("job", 0, 50, (1,)))
    del run.values["sweep.plan", -1, "plan"]["nodes"]
    assert run.page()["nodes"] == [{"name": "a", "devices": 2}]


def test_before_there_is_a_plan_and_where_it_is_kept_elsewhere() -> None:
    run = Run()
    assert (run.page()["rounds"], run.page()["jobs"], run.page()["unreadable"]) == ([], [], False)
    run.task("plan", "plan", "success", plan="s3://bucket/xcom/1", attempt="s3://bucket/xcom/2")
    assert (run.page()["rounds"], run.page()["unreadable"]) == ([], True)


def test_only_web_addresses_become_links() -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    run.train(0, "success", "job", **finished(1000, 1060))
    run.values["sweep.train", 0, "_link_MlflowRunLink"] = "javascript:alert(1)"
    assert run.job("job")["mlflow"] is None
    run.values["sweep.train", 0, "_link_MlflowRunLink"] = "https://mlflow/#/runs/1"
    assert run.job("job")["mlflow"] == "https://mlflow/#/runs/1"


def test_each_rounds_choice_is_told_and_a_round_that_has_none_for_a_job_is_left_out() -> None:
    run = two_rounds()
    run.values["sweep.trials", -1, "jobs"] = [{"name": "moves"}, {"name": "loser"}]
    entry = {"technique": "single", "devices": 1, "parameters": {}}
    for number, made, jobs in ((1, MADE, ("moves", "loser")), (2, 1052.0, ("moves",))):
        entries = [{**entry, "name": job, "attempt": made, "round": number} for job in ("moves", "loser")]
        choices = {job: {"why": f"of round {number}", "options": []} for job in jobs}
        plan = f"sweep.round_{number}.plan"
        run.values.update({(plan, -1, "return_value"): entries, (plan, -1, "choices"): choices})
    record = Record("dag", "run", "running", None, None, tuple(run.tasks), run.values)
    moves, loser = (job_choice(record, "sweep", job)["rounds"] for job in ("moves", "loser"))  # type: ignore[index]
    assert [(one["round"], one["choice"]["why"]) for one in moves] == [(1, "of round 1"), (2, "of round 2")]
    assert [one["round"] for one in loser] == [1]


def test_a_deadline_and_another_objective_are_told() -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    told = {"objective": "device-time", "value": 50.0, "value_bound": 40.0}
    run.values["sweep.plan", -1, "plan"] |= {**told, "deadline": {"at": MADE + 300, "planned": True}}
    run.train(0, "success", "job", **finished(1010, 1060))
    totals = run.page()["totals"]
    assert totals["deadline"] == {"at": 300, "planned": True}
    assert (totals["objective"], totals["value"], totals["gap"]) == ("device-time", 50, 0.25)


@pytest.mark.parametrize(("seconds", "at"), [(200.0, 200.0), (None, None)])
def test_by_when_all_is_done_with_which_odds_is_told(seconds: float | None, at: float | None) -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    promise: dict[str, Any] = {"confidence": 0.9, "seconds": seconds, "odds": 0.8, "jobs": {}}
    run.values["sweep.plan", -1, "plan"]["promise"] = promise
    run.train(0, "success", "job", **finished(1010, 1060))
    found = run.page()["totals"]["promise"]
    assert found == {"confidence": 0.9, "at": at, "why": None, "odds": 0.8}


def test_what_others_do_to_its_deadline_is_told_as_it_was_found_last_and_what_it_does_to_theirs() -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    found = run.page()["totals"]
    assert (found["expected_late"], found["breaks"]) == (None, [])
    plan = run.values["sweep.plan", -1, "plan"]
    plan["breaks"] = [{"at": MADE + 10, "expected": MADE + 30, "without": MADE + 5}]
    plan["expected_late"] = MADE + 400
    run.train(0, "running", "job", start=1010)
    found = run.page()["totals"]
    assert found["expected_late"] == 400 + MADE - run.page()["origin"]
    assert found["breaks"][0]["expected"] - found["breaks"][0]["at"] == 20
    late = "sweep.train", 0, "late"
    run.values[late] = {"time": MADE - 50, "expected": MADE + 900}
    assert run.page()["totals"]["expected_late"] == found["expected_late"], "that was of an earlier plan"
    run.values[late] = {"time": MADE + 50, "expected": MADE + 500}
    assert run.page()["totals"]["expected_late"] == found["expected_late"] + 100
    run.values[late] = {"time": MADE + 60, "expected": None}
    assert run.page()["totals"]["expected_late"] is None


def test_by_when_a_job_is_done_with_which_odds_is_told() -> None:
    run = Run()
    run.plan(on("job", 0, 50), on("other", 0, 50, (1,)))
    promise = {"confidence": 0.8, "seconds": 90.0, "odds": None, "jobs": {"job": 80.0}}
    run.values["sweep.plan", -1, "plan"]["promise"] = promise
    run.train(0, "running", "job", start=1010)
    assert (run.job("job")["by"], run.job("job")["odds"]) == (MADE + 80 - run.page()["origin"], 0.8)
    assert run.job("other")["by"] is None


def test_choices_are_told_and_their_absence_too() -> None:
    run = Run()
    entry = {"name": "job", "technique": "single", "devices": 1, "start": 0, "end": 50, "attempt": MADE}
    run.plan(
        on("job", 0, 50), return_value=[entry], choices={"job": {"why": "nothing is faster", "options": []}}
    )
    run.values["sweep.trials", -1, "jobs"] = [{"name": "job", "load_model": "m:f"}]
    record = Record("dag", "run", "running", None, None, tuple(run.tasks), run.values)
    found = job_choice(record, "sweep", "job")
    assert found["rounds"][0]["choice"]["why"] == "nothing is faster"  # type: ignore[index]
    del run.values["sweep.plan", -1, "choices"]
    assert job_choice(record, "sweep", "job")["rounds"][0]["choice"] is None  # type: ignore[index]
    assert job_choice(record, "sweep", "other") is None


def test_a_running_job_shows_what_its_task_told_last() -> None:
    run = Run()
    run.plan(on("job", 0, 50), on("next", 50, 90))
    run.train(0, "running", "job", start=1000)
    run.train(1, None)
    now: dict[str, Any] = {
        "time": 1090.0,
        "step": 30,
        "total": 120,
        "stops_at": None,
        "epoch": 1,
        "loss": 0.7,
    }
    run.told(0, eta_seconds=60.0, metrics={"eval_loss": 0.5}, **now)
    job = run.job("job")
    assert job["metrics"] == {"loss": 0.7, "eval_loss": 0.5}
    assert (job["progress"]["step"], job["progress"]["total"], job["progress"]["ends"]) == (30, 120, 150)
    # Not when it was planned to end: so late is it, and so late is who waits for its device.
    assert [job["bars"][0]["expected_end"] for job in run.page()["jobs"]] == [150, 190]
    run.told(0, attempt=1.0, **now)
    assert run.job("job")["progress"] is None, "it was told under a plan made before"


def test_a_job_that_stops_at_a_rung_is_expected_to_end_there() -> None:
    run = Run()
    run.plan(on("job", 0, 50), prefix="round_1.")
    run.train(0, "running", "job", "round_1.", start=1000)
    now: dict[str, Any] = {
        "time": 1090.0,
        "step": 30,
        "total": 120,
        "epoch": 0,
        "loss": 0.7,
        "eta_seconds": 90.0,
    }
    run.told(0, "round_1.", stops_at=60, **now)
    job = run.job("job")
    assert (job["bars"][0]["expected_end"], job["progress"]["ends"]) == (120, 180)


def test_plans_to_rungs_are_added_up_and_not_compared_with_all() -> None:
    run = two_rounds()
    assert run.page()["totals"]["is_comparable"]
    assert run.job("stays")["planned"] == 100
    for number, rung in ((1, 1), (2, None)):
        run.values[f"sweep.round_{number}.plan", -1, "plan"]["rung"] = rung
    page = run.page()
    assert not page["totals"]["is_comparable"]
    assert run.job("stays")["planned"] == 140
    assert [(r["rung"], r["took"]) for r in page["rounds"]] == [(1, 50), (None, None)]
    assert page["rounds_most"] == 2


def test_a_round_in_reserve_counts_once_it_is_needed() -> None:
    run = Run()
    run.plan(on("job", 0, 50))
    run.values["sweep.plan", -1, "plan"]["rounds_most"] = 1
    run.task("round_2.plan", "plan", None)
    page = run.page()
    assert page["rounds_most"] == 1
    assert {stage["name"]: stage["state"] for stage in page["stages"]}["plan"] == "done"
    run.tasks.pop()
    run.plan(on("job", 0, 30), prefix="round_2.")
    assert run.page()["rounds_most"] == 2


@pytest.mark.parametrize(
    ("run", "report", "trials", "has_result", "state"),
    [
        ("running", None, "success", False, "running"),
        ("success", "success", "success", True, "success"),
        ("running", "success", "success", False, "success"),
        ("failed", "failed", "success", True, "failed"),
        ("failed", "skipped", "success", False, "cancelled"),
        ("failed", "upstream_failed", "success", False, "cancelled"),
        ("failed", None, "success", False, "cancelled"),
        ("success", "success", "success", False, "cancelled"),
        ("success", "skipped", "skipped", False, "skipped"),
    ],
)
def test_how_a_sweep_stands(run: Any, report: Any, trials: Any, has_result: Any, state: Any) -> None:
    assert sweep_state(run, report, trials, has_result) == state


def test_a_cancelled_sweep_is_not_compared_with_its_plan() -> None:
    run = Run("failed")
    run.plan(on("job", 0, 50), on("next", 50, 90))
    run.train(0, "failed", "job", status="stopped", reason="stopped", started_at=1000, ended_at=1020)
    run.train(1, "skipped")
    run.task("report", "report", "skipped")
    page = run.page()
    assert (page["state"], page["totals"]["is_comparable"]) == ("cancelled", False)
    assert [job["status"] for job in page["jobs"]] == ["stopped", "not run"]


def test_the_champion_that_was_scored_anew_is_told() -> None:
    beaten = {"version": "3", "metric": "eval_loss", "value": 0.5, "best": 0.4, "beaten_by": 0.1}
    run = Run("success")
    run.plan(on("a", 0, 10))
    run.train(0, "success", "a", **finished(1010, 1020))
    run.task("report", "report", "success", return_value={"champion": beaten})
    assert run.page()["champion"] == beaten
    common = {"dag_id": "d", "run_id": "r", "sweep": "s", "trials": "success", "state": "success"}
    assert listed([{**common, "tasks": {}, "champion": beaten}])[0]["champion"] == beaten


def test_the_list_counts_jobs_and_not_tasks() -> None:
    common = {"dag_id": "d", "run_id": "r", "sweep": "s", "trials": "success", "state": "success"}
    ended = {**common, "report": "success", "actual_seconds": 9.0, "jobs": 33, "not_planned": 30}
    ended |= {"failed": [str(i) for i in range(30)], "pruned": [], "tasks": {"": {"success": 3}}}
    going: dict[str, Any] = {
        **common,
        "state": "running",
        "jobs": 8,
        "tasks": {"round_1": {"success": 8}, "round_2": {}},
    }
    going["tasks"]["round_2"] = {"success": 1, "waiting": 3}
    first, second = (sweep["jobs"] for sweep in listed([ended, going]))
    assert first == {"all": 33, "not_planned": 30, "pruned": 0, "failed": 0, "finished": 3}
    assert second == {"all": 4, "not_planned": 0, "round": 2, "finished": 1, "failed": 0}
