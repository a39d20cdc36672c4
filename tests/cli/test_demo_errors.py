"""What `saturn demo` says when it can't run: one line, whatever went wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saturn_airflow.cli import main
from saturn_airflow.demo.run import run_demo
from saturn_airflow.deployment.services import LocalServices
from saturn_airflow.model.errors import SaturnError


class Nobody(LocalServices):
    """Services of which none answers."""

    login = None
    airflow_url = "http://127.0.0.1:9"
    mlflow_url = "http://127.0.0.1:9"

    @property
    def home(self) -> Path:
        return self.state

    def start(self) -> None:
        pass


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


def test_an_airflow_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaturnError, match=r"^Airflow at http://127\.0\.0\.1:9 did not .*refused"):
        run_demo(Nobody(tmp_path), "nightly_retrain")


def test_a_cluster_without_its_compose_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saturn_airflow.commands.demo.COMPOSE", tmp_path / "compose.yaml")
    assert main(["demo", "--cluster", "--state", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"saturn demo: there is no compose file {tmp_path / 'compose.yaml'}\n"


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            [],
            "nightly_retrain needs transformers, not installed here: pip install "
            "'saturn-airflow[torch,transformers]'",
        ),
        (
            ["--cluster"],
            "nightly_on_cluster needs celery and transformers, not installed here: pip install "
            "'saturn-airflow[cluster,torch,transformers]'",
        ),
    ],
)
def test_packages_that_are_not_there_are_named_before_anything_is_started(
    cluster: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in ("celery", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", *cluster, "--state", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"saturn demo: {words}\n"
    assert not list(tmp_path.iterdir())
