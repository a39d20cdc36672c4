"""A user's technique that is wrong, but not with all of its parameters."""

from __future__ import annotations

from typing import Any

from saturn_airflow import BaseTechnique


class LossOff(BaseTechnique):
    def candidates(self, job: Any, devices: int) -> list[dict[str, Any]]:
        both = {6: [{"off": 0.5}, {"off": 0.0}], 7: [{"off": 0.0}, {"off": 0.0, "once_more": True}]}
        return both.get(job.hparams.batch_size, [{"off": 0.5}])

    def parallelize(self, model: Any, ranks: Any, *, off: float, once_more: bool = False) -> Any:  # type: ignore[override]
        from saturn_airflow.parallelism.parallel import Parallel

        class Off(Parallel):
            def backward(self, *args: Any) -> Any:
                total, over = super().backward(*args)
                return total * (1 + off), over

        return Off(model, ranks)
