"""A strategy that was refused once a job was to be trained, or in the middle of it. Plain data.

By the guard, or since its devices' memory ran out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.status import Status


@dataclass(frozen=True, kw_only=True)
class RefusedStrategy:
    """Why a job goes on under another strategy, or does not.

    :param parameters: of the technique, of this ``version``.
    :param step: the last that was trained under it, what differs among them; None where it was not begun.
    :param seconds: of that step.
    """

    technique: str
    devices: int
    reason: str
    status: Status = Status.CHANGES_RESULT
    parameters: Mapping[str, Any] = field(default_factory=dict)
    version: str = "1"
    step: int | None = None
    seconds: float | None = None

    @property
    def what(self) -> str:
        """The strategy, and what became of it."""
        ended = "ran out of memory" if self.status == Status.OUT_OF_MEMORY else "is refused"
        return f"{self.technique} x {self.devices} {ended}"

    @property
    def in_words(self) -> str:
        """The strategy, and why it is refused."""
        return f"{self.what}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """This as JSON-ready data."""
        return {**dataclasses.asdict(self), "status": str(self.status)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RefusedStrategy:
        """The refusal that :meth:`to_dict` described."""
        fields = formats.known_fields(cls, data)
        return cls(**{**fields, "status": Status(fields["status"])})
