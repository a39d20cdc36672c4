"""What all deployments that run as processes of this machine have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from saturn_airflow.deployment.processes import Processes

if TYPE_CHECKING:
    # Python has it from 3.11.
    from typing_extensions import Self


class LocalServices(ABC):
    """Airflow and MLflow on this machine, with all their state in one folder: a context that they live in.

    :ivar state: the folder.
    :ivar airflow_url: where Airflow answers.
    :ivar mlflow_url: where MLflow answers.
    """

    #: How the command line says how to log in to Airflow; empty where nobody has to.
    how_to_log_in = ""

    airflow_url: str
    mlflow_url: str

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        self.processes = Processes(self.state / "logs")

    @property
    @abstractmethod
    def home(self) -> Path:
        """The folder of checkpoints and progress of jobs (``[saturn] home``)."""

    @property
    @abstractmethod
    def login(self) -> tuple[str, str] | None:
        """User and password of Airflow's administrator; None where nobody has to log in."""

    @abstractmethod
    def start(self) -> None:
        """Start all services and wait until they are ready.

        :raises SaturnError: when one is not in time, or ends by itself, with the end of its log.
        """

    def stop(self) -> None:
        """End all services and whatever they started."""
        self.processes.stop()

    def check(self) -> None:
        """Raise :class:`SaturnError` when a service has ended by itself."""
        self.processes.check()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
