"""The part of a compose file that is needed to run its services as local processes.

The format is that of the Compose specification (https://github.com/compose-spec/compose-spec), as far as
docker/compose.yaml uses it: interpolation of ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}``, ``$$``;
commands, environments, dependencies, health checks, short volumes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from saturn_airflow.model.errors import SaturnError

_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<bare>\w+)|\{(?P<name>\w+)(?:(?P<sign>:?[-?])(?P<word>[^}]*))?\})"
)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class ComposeError(SaturnError):
    """The compose file, or what it asks of the environment, is not right."""


@dataclass(frozen=True)
class Volume:
    """``source`` is a volume's name, or a path where it has a slash; ``target`` the path in the container."""

    source: str
    target: str


@dataclass(frozen=True)
class HealthCheck:
    """A command that succeeds when the service is ready; times are seconds."""

    test: tuple[str, ...]
    interval: float
    timeout: float


@dataclass(frozen=True)
class Service:
    """One service, interpolated.

    :param depends_on: the condition under which this service may start, by the other service's name:
        ``service_started``, ``service_healthy`` or ``service_completed_successfully``.
    :param restart: whether it is started again when it ends by itself.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    volumes: tuple[Volume, ...]
    depends_on: Mapping[str, str]
    healthcheck: HealthCheck | None
    stop_signal: str
    restart: bool = False


def load(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """The services of a compose file, by name.

    :param variables: what ``${NAME}`` stands for.
    :raises ComposeError: when there is no such file or it is no YAML, a required variable is missing, or a
        dependency is not there.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ComposeError(f"there is no compose file {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ComposeError(f"{path} is no YAML: {error}") from None
    try:
        bodies = {str(name): interpolate(body, variables) for name, body in data["services"].items()}
        services = {name: _service(name, body) for name, body in bodies.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ComposeError(f"{path} has services of another form than Saturn can start ({what})") from None
    for service in services.values():
        if unknown := sorted(set(service.depends_on) - set(services)):
            raise ComposeError(f"{path}: {service.name} depends on {unknown[0]!r}, which is no service")
    return services


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """``value`` with the variables in all its texts replaced.

    :raises ComposeError: when a variable with ``:?`` or ``?`` is missing.
    """
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _replace(match, variables), value)
    if isinstance(value, Mapping):
        return {key: interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    return value


def seconds(text: str) -> float:
    """A duration of a compose file, such as ``1m30s``, as seconds; 0 of what is none."""
    parts = re.findall(r"([\d.]+)(us|ms|s|m|h)", text)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _replace(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match["escaped"]:
        return "$"
    name, sign, word = match["bare"] or match["name"], match["sign"] or "", match["word"] or ""
    value = variables.get(name)
    missing = not value if sign.startswith(":") else value is None
    if missing and sign.endswith("?"):
        raise ComposeError(f"the variable {name} is not set: {word}")
    if missing:
        return word
    return value or ""


def _service(name: str, body: Mapping[str, Any]) -> Service:
    return Service(
        name=name,
        image=body["image"],
        command=_words(body["command"]),
        environment={key: str(value) for key, value in body.get("environment", {}).items()},
        volumes=tuple(_volume(text) for text in body.get("volumes", ())),
        depends_on=_dependencies(body.get("depends_on", {})),
        healthcheck=_healthcheck(body.get("healthcheck")),
        stop_signal=body.get("stop_signal", "SIGTERM"),
        restart=body.get("restart", "no") in ("always", "unless-stopped"),
    )


def _words(command: str | list[str]) -> tuple[str, ...]:
    return tuple(shlex.split(command) if isinstance(command, str) else command)


def _volume(text: str) -> Volume:
    source, target = text.split(":")[:2]
    return Volume(source, target)


def _dependencies(value: list[str] | Mapping[str, Any]) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {name: body.get("condition", "service_started") for name, body in value.items()}
    return dict.fromkeys(value, "service_started")


def _healthcheck(body: Mapping[str, Any] | None) -> HealthCheck | None:
    if body is None:
        return None
    kind, *words = body["test"]
    test = ("sh", "-c", words[0]) if kind == "CMD-SHELL" else tuple(words)
    interval = body.get("start_interval") or body.get("interval", "30s")
    return HealthCheck(test, seconds(interval), seconds(body.get("timeout", "30s")))
