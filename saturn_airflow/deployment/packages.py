"""Which Debian packages a machine lacks that is to run the compose file's services as processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable

from saturn_airflow.deployment.compose import Service

#: By program that an image, a command or a health check names.
_PACKAGES = {
    "redis-server": "redis-server",
    "redis-cli": "redis-server",
    "postgres": "postgresql",
    "pg_isready": "postgresql",
    "curl": "curl",
}


def missing_packages(services: Iterable[Service], path: str) -> list[str]:
    """The packages of the programs that services need and that are in no folder of ``path``."""
    texts = [
        " ".join([service.image.partition(":")[0], *service.command, *_check_of(service)])
        for service in services
    ]
    found = {
        package
        for program, package in _PACKAGES.items()
        if any(re.search(rf"(?<![\w./-]){program}(?![\w./-])", text) for text in texts)
        and shutil.which(program, path=path) is None
    }
    return sorted(found)


def _check_of(service: Service) -> tuple[str, ...]:
    return () if service.healthcheck is None else tuple(service.healthcheck.test)
