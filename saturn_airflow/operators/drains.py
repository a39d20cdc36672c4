"""Nodes that are drained: no new plan uses them until that is undone."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from saturn_airflow.model import formats, json_text
from saturn_airflow.model.disks import write_for_all
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.operators.context import home


def drain(node: str, reason: str = "") -> None:
    """Let no new plan use ``node``."""
    note = {**formats.stamp("a drain"), "reason": reason, "since": time.time()}
    write_for_all(_file(node), json.dumps(note))


def undrain(node: str) -> bool:
    """Let plans use ``node`` again; whether it was drained."""
    with contextlib.suppress(FileNotFoundError):
        _file(node).unlink()
        return True
    return False


def drained() -> dict[str, str]:
    """By the name of each drained node, why it is, in words.

    :raises InvalidSweepError: when a note is damaged.
    :raises NewerFormatError: when a newer version wrote it in a way that this one can't read.
    """
    found = {}
    for path in sorted((home() / "drained").glob("*.json")):
        try:
            note = json_text.parse(path.read_text())
            formats.check(note, "a drain", path)
            reason = note["reason"]
        except FileNotFoundError:  # undone just now
            continue
        except PermissionError:  # that it is there says enough
            reason = f"who may read {path} knows why"
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidSweepError(f"{path} is damaged; run `saturn drain {path.stem}` again") from None
        found[path.stem] = f"it is drained ({reason})" if reason else "it is drained"
    return found


def _file(node: str) -> Path:
    return home() / "drained" / f"{node}.json"
