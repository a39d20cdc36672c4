"""A strategy that was refused once a job was to be trained, or in the middle of it. Plain data.

By the guard, or since its devices' memory ran out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import formats, guards
from saturn_airflow.model.status import Status


@dataclass(frozen=True, kw_only=True)
class RefusedStrategy:
    """Why a job goes on under another strategy, or does not.

    :param parameters: of the technique, of this ``version``.
    :param step: the last that was trained under it, what differs among them; None where it was not begun.
        Of what ran out of memory None, too: what it trained counts.
    :param seconds: of the last step under it.
    :param own_code: of what ran out of memory, by :func:`~saturn_airflow.model.guards.own_code`; else None.
    """

    technique: str
    devices: int
    reason: str
    status: Status = Status.CHANGES_RESULT
    parameters: Mapping[str, Any] = field(default_factory=dict)
    version: str = "1"
    step: int | None = None
    seconds: float | None = None
    own_code: str | None = None

    @property
    def what(self) -> str:
        """The strategy, and what became of it."""
        ended = "ran out of memory" if self.status == Status.OUT_OF_MEMORY else "is refused"
        return f"{self.technique} x {self.devices} {ended}"

    @property
    def in_words(self) -> str:
        """The strategy, and why it is refused."""
        return f"{self.what}: {self.why}"

    @property
    def why(self) -> str:
        """The reason behind :attr:`what`: the strategy is not named again."""
        strategy = f"{self.technique} x {self.devices} "
        named = self.reason.startswith(strategy)
        return f"it {self.reason.removeprefix(strategy)}" if named else self.reason

    @property
    def verdict(self) -> str:
        """What later plans are to know of it, as a verdict of the guard."""
        ran_out = self.status == Status.OUT_OF_MEMORY
        return (guards.ran_out if ran_out else guards.refused)(self.reason)

    def to_dict(self) -> dict[str, Any]:
        """This as JSON-ready data."""
        return {**dataclasses.asdict(self), "status": str(self.status)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RefusedStrategy:
        """The refusal that :meth:`to_dict` described."""
        fields = formats.known_fields(cls, data)
        return cls(**{**fields, "status": Status(fields["status"])})
