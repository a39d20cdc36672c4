"""Objects of the job's own classes in attributes and containers: resumed, or refused at the trial."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_remembering import STOPPED_AT, guard, job, requests, train_all

from saturn_airflow.model.jobs import Job
from saturn_airflow.training import ranks

pytestmark = pytest.mark.ranks


def keeping(how: str, *, inside: bool) -> Job:
    return job(load_model="remembering_jobs:keeps_own", model_args={"how": how, "inside": inside})


GOES_ON = [(how, False) for how in ("list", "mapping", "object", "none")] + [("object", True)]


@pytest.mark.parametrize(("how", "inside"), GOES_ON)
def test_they_are_resumed(how: str, inside: bool, tmp_path: Path) -> None:
    a_job = keeping(how, inside=inside)
    whole, first, rest = (
        dataclasses.replace(requests(tmp_path / place, count)[0], job=a_job)
        for place, count in (("whole", None), ("parts", STOPPED_AT), ("parts", None))
    )
    ((straight, _),) = ranks.launch(train_all, [whole], size=1)[0]
    losses = []
    for request in (first, rest):
        ((part, warnings),) = ranks.launch(train_all, [request], size=1)[0]
        losses += part
        assert not warnings
    assert losses == straight


@pytest.mark.parametrize("how", ["list", "mapping", "none"])
def test_what_could_not_be_made_anew_is_refused_at_the_trial(how: str) -> None:
    (told,) = ranks.launch(guard, keeping(how, inside=True), size=1)
    assert told.startswith("training depends on 'kept', which it changes, and which a job that is resumed")
    assert "keeps_own.<locals>.Local' can't be imported; define the class at the top" in told
