"""Parts of a ``Trainer`` that are replaced while it trains, such as its schedule: a resumed one has the first
ones."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from saturn_airflow.training.trainers import seen_state

_PARTS = ("optimizer", "lr_scheduler", "compute_loss_func", "compute_metrics", "data_collator")


class ReplacedParts:
    """The parts of ``trainer`` as training begins."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._given = self._now()
        self._smoothing = self._label_smoother()

    def names(self) -> list[str]:
        """What is another by now."""
        now = self._now()
        replaced = [name for name, part in now.items() if not _are_same(part, self._given[name])]
        return [*replaced, *seen_state.differing(self._smoothing, self._label_smoother())]

    def _now(self) -> dict[str, Any]:
        trainer = self._trainer
        groups = trainer.optimizer.param_groups
        return {
            **{f"the Trainer's {name}": vars(trainer).get(name) for name in _PARTS},
            "the parameters of the Trainer's optimizer": [p for group in groups for p in group["params"]],
            "the Trainer's callbacks": list(trainer.callback_handler.callbacks),
            "the state's max_steps": trainer.state.max_steps,
        }

    def _label_smoother(self) -> seen_state.Seen:
        smoother = self._trainer.label_smoother
        held = {} if smoother is None else vars(smoother)
        return seen_state.of_parts({"label_smoother": dict(held)}, self._trainer)


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other or (isinstance(one, int) and one == other)
