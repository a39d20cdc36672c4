"""Who holds devices of a machine or waits for them, as files in its folder of leases tell it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model.claims import Claim
from saturn_airflow.model.plain_numbers import is_number

#: What is believed of a file at the most: characters of words for people.
_MOST_WORDS = 500


@dataclass(frozen=True)
class Holder:
    """Who holds devices, or waits for them.

    :param who: words for people, such as ``"nightly_retrain/2026-11-21 sweep: job gpt2-small"``.
    :param pid: of the process that asked.
    :param since: seconds since the epoch.
    :param claim: of a job of a sweep, or of a trial, what others need to know of it.
    """

    who: str
    pid: int
    since: float
    claim: Claim | None = None

    def to_dict(self) -> dict[str, Any]:
        """This holder as JSON-ready data."""
        own = {"who": self.who, "pid": self.pid, "since": self.since}
        # Versions that know nothing of claims of trials would take them for jobs.
        return own if self.claim is None else {**own, _key_of(self.claim): self.claim.to_dict()}

    @classmethod
    def read(cls, data: Any) -> Holder:
        """The holder that a file tells of.

        :raises ValueError: when it tells of none.
        """
        if not isinstance(data, dict) or not {"who", "pid", "since"} <= set(data):
            raise ValueError("it does not say whose it is")
        who = str(data["who"])[:_MOST_WORDS]
        words = "".join(character if character.isprintable() else "?" for character in who)
        if not is_count(data["pid"]) or not is_moment(data["since"]):
            raise ValueError("its process or time is not a number")
        claim = None
        with contextlib.suppress(ValueError):
            claim = next((Claim.from_dict(data[key]) for key in ("claim", "trial") if key in data), None)
        return cls(words, data["pid"], float(data["since"]), claim)


def _key_of(claim: Claim) -> str:
    return "trial" if claim.sweep.trials else "claim"


def is_count(value: Any) -> bool:
    """Whether it is a whole number that can be one of processes or devices."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_moment(value: Any) -> bool:
    """Whether it is a number that can be a moment, or a time."""
    return is_number(value) and -1e18 < value < 1e18
