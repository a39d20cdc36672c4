"""Reading JSON that comes from a file or a service, where it may be damaged in any way."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value that JSON describes.

    :raises ValueError: for what is no JSON, and for what nests deeper than Python's reader can follow, which
        would raise a ``RecursionError`` there.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
