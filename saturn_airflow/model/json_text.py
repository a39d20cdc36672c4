"""Reading JSON that comes from a file or a service, where it may be damaged in any way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saturn_airflow.model.errors import InvalidSweepError


def parse(text: str | bytes) -> Any:
    """The value that JSON describes.

    :raises ValueError: for what is no JSON, and for what nests deeper than Python's reader can follow, which
        would raise a ``RecursionError`` there.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def read(path: str | Path) -> Any:
    """What a JSON file that a user named holds.

    :raises InvalidSweepError: when it can't be read, or is no JSON.
    """
    try:
        return parse(Path(path).read_text())
    except OSError as error:
        raise InvalidSweepError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidSweepError(f"{path} is not JSON: {error}") from None
