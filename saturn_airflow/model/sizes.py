"""Amounts of memory and of disk, as people write them: ``"64 GB"``, or ``"0.9"`` of what there is."""

from __future__ import annotations

import re

from saturn_airflow.model.errors import InvalidSweepError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
# A percent sign would have to be doubled in airflow.cfg.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b)?", re.IGNORECASE)


def parse(text: str, what: str) -> tuple[float, bool]:
    """The number that ``text`` gives, and whether it is a part of the whole (as ``"0.9"``) or bytes.

    :param what: the setting it is of, for the message.
    :raises InvalidSweepError: when it is no such amount.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidSweepError(f"{what} is {text!r}; give an amount such as '64 GB' or '500 GiB'")
    number, unit = float(found[1]), (found[2] or "").lower()
    is_part = 0 < number <= 1 and not unit and not found[3]
    return (number, True) if is_part else (number * _UNITS[unit], False)


def bytes_of(text: str, what: str, whole: float | None = None) -> float:
    """The bytes that ``text`` means.

    :param what: the setting it is of, for the message.
    :param whole: what a part is of, in bytes; None where there is no such thing.
    :raises InvalidSweepError: when it is no such amount.
    """
    number, is_part = parse(text, what)
    if not is_part:
        return number
    if whole is None:
        raise InvalidSweepError(f"{what} is {text!r}; give an amount such as '500 GB', not a part")
    return number * whole


def shown(count: float) -> str:
    """``count`` bytes for people."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
