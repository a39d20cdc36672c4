"""The services of the compose file as processes of this machine.

Commands, environments, dependencies, health checks and volumes come from the compose file. What differs from
containers is this, and no more:

- every ``<NAME>_HOST`` is 127.0.0.1, every ``<NAME>_PORT`` a free port, and ``LISTEN`` 127.0.0.1;
- sizes are those of :data:`SMALL`;
- where a command or an environment names the path of a volume, it gets the volume's folder on this machine;
- the image of Postgres makes its folder before its first start: :func:`_prepare_postgres` does that here.
  Postgres refuses to run as root, so root runs it as the user ``postgres``;
- nothing is locked up: no service is kept from files, memory or capabilities.
"""

from __future__ import annotations

import base64
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from saturn_airflow.deployment.compose import Service, load
from saturn_airflow.deployment.databases import NAMES
from saturn_airflow.deployment.packages import missing_packages
from saturn_airflow.deployment.processes import HOST, free_port
from saturn_airflow.deployment.restart_policy import RestartPolicy
from saturn_airflow.deployment.services import LocalServices
from saturn_airflow.launch.file_locks import try_lock
from saturn_airflow.model.errors import SaturnError

#: The ports of the compose file, with their usual numbers.
PORTS = {"POSTGRES_PORT": 5432, "REDIS_PORT": 6379, "MLFLOW_PORT": 5000, "AIRFLOW_PORT": 8080}
HOSTS = ("POSTGRES_HOST", "REDIS_HOST", "MLFLOW_HOST", "AIRFLOW_HOST")
#: As much as one machine needs that also trains.
SMALL = {
    "AIRFLOW_API_WORKERS": "1",
    "MLFLOW_WORKERS": "1",
    "WORKER_CONCURRENCY": "2",
    "AIRFLOW_DAGS_REFRESH": "5",
}
_READY_SECONDS = 180.0


class LocalCluster(LocalServices):
    """A whole deployment on this machine, listening on 127.0.0.1 only; all its state is in one folder.

    :param state: the folder; made when it is not there. A cluster started there again finds its databases.
    :param compose: the compose file.
    :param dags: the DAGs folder.
    :param variables: variables of the compose file that are to differ.
    :param environment: what is added to, or replaced in, the environment of every service.
    :raises SaturnError: from :meth:`start`, when a service does not come up, with the end of its log.
    """

    def __init__(
        self,
        state: Path,
        compose: Path,
        dags: Path,
        variables: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(state)
        self._secrets = self.state / "secrets.env"
        ports = {name: str(free_port(usual)) for name, usual in PORTS.items()}
        self.airflow_url = f"http://{HOST}:{ports['AIRFLOW_PORT']}"
        self.mlflow_url = f"http://{HOST}:{ports['MLFLOW_PORT']}"
        self.variables = {
            **secrets_of(self._secrets),
            **SMALL,
            **ports,
            **dict.fromkeys(HOSTS, HOST),
            "LISTEN": HOST,
            "AIRFLOW_URL": self.airflow_url,
            "MLFLOW_URL": self.mlflow_url,
            "SATURN_DAGS": str(dags.resolve()),
            **(variables or {}),
        }
        self.services = load(compose, self.variables)
        self._compose = compose
        self._added = dict(environment or {})
        self._folders = {
            "/opt/airflow": self.state / "airflow",
            **{
                volume.target: self._volume(volume.source)
                for service in self.services.values()
                for volume in service.volumes
            },
        }
        self.how_to_log_in = f"Log in to Airflow as {self.login[0]}; the password is in {self._secrets}."
        self._ready: set[str] = set()
        self._lock: IO[bytes] | None = None

    @property
    def home(self) -> Path:
        """The folder that all nodes see: checkpoints and progress of jobs."""
        return Path(self.environment("worker")["AIRFLOW__SATURN__HOME"])

    @property
    def leases(self) -> Path:
        """The folder of the device locks."""
        return Path(self.environment("worker")["AIRFLOW__SATURN__LEASES_FOLDER"])

    @property
    def login(self) -> tuple[str, str]:
        """User and password of Airflow's administrator."""
        return self.variables.get("AIRFLOW_ADMIN_USER", "admin"), self.variables["AIRFLOW_ADMIN_PASSWORD"]

    def environment(self, name: str) -> dict[str, str]:
        """The environment of a service, for a command that is to run beside it."""
        own = {key: self._local(value) for key, value in self.services[name].environment.items()}
        return {**os.environ, **own, "PATH": _path(), **self._added}

    def start(self, timeout: float = 400.0) -> None:
        """Start all services, each as soon as those it depends on are ready, and wait until all are.

        :raises SaturnError: when a program is not installed that they need, when one fails, or when they are
            not ready within ``timeout`` seconds.
        """
        self._require_programs()
        for folder in self._folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        deadline = time.monotonic() + timeout
        waiting = dict(self.services)
        checks: dict[str, subprocess.Popen[bytes]] = {}
        checked: dict[str, float] = {}
        while len(self._ready) < len(self.services):
            for service in [s for s in waiting.values() if self._may_start(s)]:
                self._launch(waiting.pop(service.name))
            for name in set(self.services) - set(waiting) - self._ready:
                self._note_if_ready(self.services[name], checks, checked)
            self.check()
            if time.monotonic() > deadline:
                late = sorted(set(self.services) - self._ready)
                tails = "\n".join(f"--- {name}\n{self.processes.tail(name)}" for name in late)
                raise SaturnError(f"not ready after {timeout:.0f} s: {', '.join(late)}\n{tails}")
            time.sleep(0.1)

    def wait_ready(self, name: str) -> None:
        """Wait until a service that was started again passes its health check.

        :raises SaturnError: when it does not within three minutes.
        """
        service = self.services[name]
        assert service.healthcheck is not None, name
        deadline = time.monotonic() + _READY_SECONDS
        while not self._healthy(service):
            if time.monotonic() > deadline:
                raise SaturnError(
                    f"{name} is not ready after {_READY_SECONDS:.0f} s\n{self.processes.tail(name)}"
                )
            time.sleep(0.2)

    def kill(self, name: str, sign: int = signal.SIGKILL, everything: bool = False) -> None:
        """End one service as a fault would (see :meth:`Processes.kill`)."""
        self.processes.kill(name, sign, everything)

    def start_again(self, name: str, wait: bool = True) -> None:
        """Start a killed service again, and wait until it is ready."""
        self.processes.start_again(name)
        if wait:
            self.wait_ready(name)

    def restarts(self, say: Callable[[str], object]) -> RestartPolicy:
        """What starts services again that end by themselves, where the compose file says so.

        :param say: told of each end in a sentence.
        """
        names = [service.name for service in self.services.values() if service.restart]
        return RestartPolicy(self.processes, names, say)

    def stop(self) -> None:
        """End all services and whatever they started; those that others depend on go last."""
        signs = {s.name: signal.Signals[s.stop_signal] for s in self.services.values()}
        needed = {name for service in self.services.values() for name in service.depends_on}
        self.processes.stop([name for name in self.services if name not in needed], signs)
        self.processes.stop(None, signs)
        self._ready.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _require_programs(self) -> None:
        """Refuse to start where a program is missing that a service runs."""
        if missing := " ".join(missing_packages(self.services.values(), _path())):
            raise SaturnError(
                f"this machine lacks {missing} for a cluster of its own; "
                f"on Debian and Ubuntu: sudo apt-get install {missing}"
            )

    def _lock_folder(self) -> None:
        """Refuse to share the folder with another cluster; end what a killed one left behind."""
        self._lock = (self.state / "lock").open("wb")
        if not try_lock(self._lock):
            raise SaturnError(f"a cluster already runs in {self.state}; end it, or use another folder")
        for name in self.services:
            self.processes.end_marked(name)

    def _may_start(self, service: Service) -> bool:
        """Whether what a service depends on is as far as it asks for."""
        started = set(self.processes.running())
        return all(
            name in (started if condition == "service_started" else self._ready)
            for name, condition in service.depends_on.items()
        )

    def _launch(self, service: Service) -> None:
        command = tuple(self._local(word) for word in service.command)
        environment = self.environment(service.name)
        if service.image.startswith("postgres:"):
            command = (
                *_prepare_postgres(service, environment),
                *command[1:],
                *_POSTGRES_LOCAL,
            )
        once = service.healthcheck is None
        self.processes.launch(service.name, command, environment, self.state / "airflow", once)

    def _note_if_ready(
        self, service: Service, checks: dict[str, subprocess.Popen[bytes]], checked: dict[str, float]
    ) -> None:
        """Note whether a started service is ready, without waiting for its health check to end.

        A service without one is ready when it has ended well: it does its work once.

        :param checks: the health checks that run, by service.
        :param checked: when the last one of each ended, on the monotonic clock.
        """
        name = service.name
        if service.healthcheck is None:
            if self.processes.ended(name) is not None:
                self.processes.finish(name)
                self._ready.add(name)
        elif name not in checks:
            if time.monotonic() - checked.get(name, 0.0) >= service.healthcheck.interval:
                checks[name] = self._start_check(service)
        elif (status := checks[name].poll()) is not None:
            del checks[name]
            checked[name] = time.monotonic()
            if status == 0:
                self._ready.add(name)

    def _start_check(self, service: Service) -> subprocess.Popen[bytes]:
        assert service.healthcheck is not None
        command = ("timeout", str(service.healthcheck.timeout), *service.healthcheck.test)
        return subprocess.Popen(
            [self._local(word) for word in command],
            env=self.environment(service.name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _healthy(self, service: Service) -> bool:
        return self._start_check(service).wait() == 0

    def _volume(self, source: str) -> Path:
        """The folder here of a volume, or of a path that is relative to the compose file."""
        if source.startswith((".", "/")):
            return (self._compose.parent / source).resolve()
        return self.state / "volumes" / source

    def _local(self, text: str) -> str:
        """``text`` with the paths of volumes replaced by their folders here."""
        for target in sorted(self._folders, key=len, reverse=True):
            text = re.sub(rf"{re.escape(target)}(?![\w-])", str(self._folders[target]), text)
        return text


def secrets_of(path: Path) -> dict[str, str]:
    """The secrets kept in ``path``, to which those are added that are not there yet, or empty.

    The file is its owner's alone from then on.

    :returns: by the names of the compose file's variables.
    """
    # What else is in it, such as logs and Airflow's files, is nobody else's either.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+") as file:
        with suppress(PermissionError):  # another user's, who let this one write to it
            os.fchmod(file.fileno(), 0o600)
        file.seek(0)
        text = file.read()
        lines = (line.strip() for line in text.splitlines())
        pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
        kept = {name: value for name, _, value in pairs}
        missing = {name: value for name, value in new_secrets().items() if not kept.get(name)}
        ending = "" if text.endswith("\n") or not text else "\n"
        file.write(ending + "".join(f"{name}={value}\n" for name, value in missing.items()))
    return {**kept, **missing}


def new_secrets() -> dict[str, str]:
    """Fresh secrets for every variable of the compose file that has no default."""
    databases = [f"{name.upper()}_DATABASE_PASSWORD" for name in NAMES]
    names = ("POSTGRES_PASSWORD", *databases, "REDIS_PASSWORD", "AIRFLOW_ADMIN_PASSWORD")
    keys = ("AIRFLOW_SECRET_KEY", "AIRFLOW_JWT_SECRET")
    return {
        # No word that a command line could take for an option.
        **{name: secrets.token_hex(16) for name in names},
        **{name: secrets.token_hex(32) for name in keys},
        "AIRFLOW_FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    }


_POSTGRES_LOCAL = ("-c", f"listen_addresses={HOST}", "-c", "unix_socket_directories=")


def _prepare_postgres(service: Service, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Do what the image's entry point does before the first start; the words that run the server.

    :raises SaturnError: when Postgres refuses.
    """
    data = Path(environment["PGDATA"])
    server = shutil.which("postgres", path=environment["PATH"])
    assert server is not None, "looked for before anything was started"
    as_user: tuple[str, ...] = ()
    if os.geteuid() == 0:
        account = pwd.getpwnam("postgres")
        os.chown(data, account.pw_uid, account.pw_gid)
        # The capability lets it pass through folders of root's on the way to its own.
        capability = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")
        as_user = ("setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", *capability)
    data.chmod(0o700)
    program = (*as_user, server)
    if not (data / "PG_VERSION").exists():
        password = f"{environment['POSTGRES_PASSWORD']}\n"
        initdb = str(Path(server).with_name("initdb"))
        options = ("--auth=scram-sha-256", "--pwfile=/dev/stdin", "--encoding=UTF8", "--locale=C.UTF-8")
        user = f"--username={environment['POSTGRES_USER']}"
        _feed((*as_user, initdb, "--no-sync", user, *options), password, environment)
    (data / "postmaster.pid").unlink(missing_ok=True)
    return program


def _feed(command: tuple[str, ...], text: str, environment: Mapping[str, str]) -> None:
    """Run a command with ``text`` as its input; its output is the error where it fails."""
    done = subprocess.run(
        command, input=text, env=dict(environment), cwd="/", text=True, capture_output=True, check=False
    )
    if done.returncode != 0 or "ERROR" in done.stderr:
        raise SaturnError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")


def _path() -> str:
    """Where services find their programs."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), *_postgres_bin()])


def _postgres_bin() -> list[str]:
    """Where Debian keeps the programs of Postgres, newest first."""
    found = Path("/usr/lib/postgresql").glob("*/bin")
    return [str(path) for path in sorted(found, key=lambda path: int(path.parent.name), reverse=True)]
