"""Scoring a registered model's champion on tonight's evaluation data, before anything takes its place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.model import secrets
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError, SaturnError
from saturn_airflow.model.folders import slug
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import wishes
from saturn_airflow.operators.choosing import best_of
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    leases_folder,
    mlflow_uri,
    pull_from_trials,
    technique_folders,
    user_path,
)
from saturn_airflow.operators.following import go_with_parent
from saturn_airflow.operators.round_outcomes import last_outcomes
from saturn_airflow.operators.upstream_jobs import check_stored, handed_on
from saturn_airflow.operators.xcom_parts import ListingOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What is known of the champion: its version, why it can't be scored, and what its task pushes of its score.
CHAMPION_KEY, SCORE_KEY = "champion", "score"
# Metrics that training gives, on training data, with weights that change meanwhile.
_OF_TRAINING = ("loss", "epoch_loss")


class ChampionOperator(ListingOperator):
    """Fetch the champion, and say which node is to score it: the one that trained the sweep's best job.

    Pushes ``champion``: ``version`` (None where there is none), ``why`` (it can't be scored, else None) and
    ``attempt`` (what its score is known by); nothing where it need not be scored.
    """

    def __init__(
        self,
        *,
        settings: SweepSettings,
        plan_tasks: list[str],
        train_tasks: list[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.settings = settings
        self.plan_tasks = plan_tasks
        self.train_tasks = train_tasks

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """The one entry for the node that scores; none where nothing is to be scored."""
        jobs = {job["name"]: job for job in pull_from_trials(context, self.settings.trials_task, "jobs")}
        outcomes = last_outcomes(context["ti"], self.plan_tasks, self.train_tasks)
        best = best_of(list(outcomes.values()), self.settings.metric, self.settings.better)
        if best is None or not wishes.registers(context):
            return []
        job = Job.from_dict(jobs[best["job"]])
        if best["metric"] in _OF_TRAINING or job.load_eval_dataloader is None:
            self.log.info("%s is of training data: the champion is not scored anew", best["metric"])
            return []
        named = {str(own["load_model"]) for own in jobs.values()}
        found, entry = self._entry(context, job, outcomes[job.name], named)
        found["attempt"] = time.time()
        context["ti"].xcom_push(CHAMPION_KEY, found)
        if found["why"]:
            self.log.warning("The champion can't be scored: %s", found["why"])
        told = {"metric": best["metric"], "mine": best["value"], "attempt": found["attempt"]}
        return [] if entry is None else [{**entry, **told}]

    def _entry(
        self, context: Context, job: Job, outcome: Outcome, named: set[str]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What is known of the champion, fetched from MLflow, and the entry by which it is scored.

        :param job: the sweep's best, whose evaluation data it is scored on.
        :param outcome: of that job, whose node scores.
        :param named: the ``load_model`` of the sweep's jobs, which a stored job may name, too.
        :returns: ``version`` and ``why`` it can't be scored; and the entry, None where it can't.
        """
        from saturn_airflow.profiling import scoring_earlier
        from saturn_airflow.tracking import champion
        from saturn_airflow.tracking.server import TrackingError

        sweep = SweepContext.of(context, self.settings.group)
        name = str(self.settings.register_as).partition("@")[0]
        try:
            found = champion.fetch(mlflow_uri(self.settings.mlflow_conn_id), name, sweep.folder / "champion")
        except TrackingError as error:
            return {"version": None, "why": f"MLflow did not answer ({error})"}, None
        if found is None:
            self.log.info("%s has no champion yet", name)
            return {"version": None, "why": None}, None
        version, planned = found["version"], outcome.planned
        assert planned is not None, "a job that has finished had a place in the plan"
        if found["job"] is None:
            return {"version": version, "why": "it is no model that a sweep has trained"}, None
        try:
            trained = Job.from_dict(found["job"])
        except SaturnError as error:  # such as a newer version's
            return {"version": version, "why": f"its job can't be read here: {error}"}, None
        try:
            check_stored(str(trained.load_model), "its load_model", named)
        except InvalidSweepError as error:
            return {"version": version, "why": str(error)}, None
        # Whoever may write to MLflow is not to choose what connections are looked up for it.
        foreign = {key for _, key in secrets.fields(trained)} - {key for _, key in secrets.fields(job)}
        if foreign:
            conn_id, field = sorted(foreign)[0]
            why = f"its model takes the {field} of connection {conn_id!r}, which {job.name!r} does not"
            return {"version": version, "why": why}, None
        entry = {
            "node": planned.node,
            "name": name,
            "version": version,
            "job": scoring_earlier.job_of(trained, job, f"models:/{name}/{version}").to_dict(),
            "strategy": scoring_earlier.strategy_of(trained, job, planned),
            "weights": str(Path(found["weights"]).relative_to(sweep.folder)),
        }
        return {"version": version, "why": None}, entry


class ScoreOperator(BaseOperator):
    """Score the champion here.

    Pushes ``score``: ``version``, its ``value`` or ``why`` it has none, ``no_number`` where what it has
    is NaN or infinite, and the ``attempt`` that wanted it.
    """

    def __init__(
        self, *, entry: dict[str, Any], node: dict[str, Any], settings: SweepSettings, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.entry = entry
        self.node = node
        self.settings = settings

    def execute(self, context: Context) -> None:
        """Score.

        :raises AirflowFailException: when the champion can't be scored; why is in ``score``, too.
        """
        from saturn_airflow.profiling import scoring_earlier

        go_with_parent()
        sweep, entry, node = SweepContext.of(context, self.settings.group), self.entry, Node(**self.node)
        what = f"version {entry['version']} of {entry['name']}"
        pushed = {"version": entry["version"], "value": None, "why": None, "attempt": entry.get("attempt")}
        try:
            job = Job.from_dict(entry["job"])
            found = scoring_earlier.score(
                job,
                entry["strategy"],
                node,
                weights=str(sweep.folder / entry["weights"]),
                folder=sweep.folder / "champion" / slug(f"scored on {node.name}"),
                holder=f"{sweep.key}: scoring {what}",
                leases_folder=leases_folder(),
                technique_folders=technique_folders(),
                path=user_path(),
                handed=handed_on(job, self, context),
                log=self.log.info,
            )
            value = {**found["metrics"], "eval_loss": found["eval_loss"]}.get(entry["metric"])
            pushed["value"] = finite(value)
            if value is None:
                pushed["why"] = f"it has no {entry['metric']} on this data"
            elif pushed["value"] is None:
                pushed["no_number"] = True
        except SaturnError as error:
            pushed["why"] = str(error)
        context["ti"].xcom_push(SCORE_KEY, pushed)
        if pushed["why"]:
            raise AirflowFailException(f"{what} can't be scored: {pushed['why']}")
        self.log.info(
            "%s has %s %.6g on this data; the sweep's best has %.6g",
            what,
            entry["metric"],
            value,
            entry["mine"],
        )


def scored(context: Context, tasks: Sequence[str]) -> dict[str, Any] | None:
    """What the champion is to be measured by; None where it was not to be scored.

    :param tasks: that of :class:`ChampionOperator`, and those of :class:`ScoreOperator`, if there are any.
    :returns: ``version``, ``value`` or ``why`` there is none, and ``no_number`` where it has NaN.
    """
    if not tasks:
        return None
    ti, (champion_task, *score_tasks) = context["ti"], tasks
    found, listed = (
        ti.xcom_pull(task_ids=champion_task, key=key, map_indexes=-1)
        for key in (CHAMPION_KEY, "return_value")
    )
    if found is None:
        failed = {"version": None, "value": None, "why": "the task that fetches it failed; see its log"}
        return failed if listed is None else None
    scores = ti.xcom_pull(task_ids=list(score_tasks), key=SCORE_KEY) or []
    # Airflow keeps what instances pushed that are no longer there: of other data, or another node's.
    wanted = found["version"], found.get("attempt")
    own = [score for score in scores if score and (score["version"], score.get("attempt")) == wanted]
    if own:
        return {key: own[-1][key] for key in ("version", "value", "why", "no_number") if key in own[-1]}
    lost = found["version"] is not None and found["why"] is None
    why = "its task left no score; see its log" if lost else found["why"]
    return {"version": found["version"], "value": None, "why": why}
