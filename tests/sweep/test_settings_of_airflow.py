"""What Airflow is told of Saturn's settings is as its configuration can read it."""

from __future__ import annotations

from airflow.sdk import conf

from saturn_airflow.operators.context import job_memory
from saturn_airflow.provider import get_provider_info


def test_every_default_is_read_as_it_was_written() -> None:
    options = get_provider_info()["config"]["saturn"]["options"]
    for name, option in options.items():
        if option["default"] is not None:
            assert conf.get("saturn", name) == option["default"]
        assert "%" not in str(option["example"]), "airflow.cfg interpolates it"
    assert job_memory() == "0.9"
