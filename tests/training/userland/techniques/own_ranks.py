"""A user's technique that runs functions of its own on Saturn's ranks."""

from __future__ import annotations

from typing import Any

from saturn_airflow import BaseTechnique


def count_ranks(factor: int, ranks: Any) -> int:
    ranks.emit("counted", size=ranks.size)
    return factor * (ranks.rank + 1)


class OwnRanks(BaseTechnique):
    def search(self, job: Any, devices: Any, session: Any) -> tuple[dict[str, Any], float]:
        return {"sum": sum(session.launch(count_ranks, 10))}, 0.5

    def execute(
        self, job: Any, devices: Any, session: Any, parameters: Any, batch_count: int | None = None
    ) -> None:
        session.emit("summed", sum=sum(session.launch(count_ranks, 100)))
