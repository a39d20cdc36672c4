"""Where in its epochs a ``Trainer`` stands; its own checkpoints know it only while no epoch was cut short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerControl

from saturn_airflow.model.errors import JobError

# An epoch that no training has, behind all of them.
_BEHIND_ALL = 2**62


class TrainedEpochs:
    """Counts a trainer's epochs and their batches, and has it go on where another stood."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._from: tuple[int, int] | None = None

    def go_on(self, kept: Mapping[str, Any], *, only_more: bool) -> None:
        """Have training, which is still to begin, go on at a :meth:`position`.

        :param only_more: with what is left of its epochs, though a callback had ended training.
        """
        trainer = self._trainer
        over = kept["over"] and not only_more
        self._from = begin = (_BEHIND_ALL, 0) if over else (kept["epoch"], kept["batches"])
        if not hasattr(trainer, "_init_training_state"):
            raise JobError(
                "a callback of the Trainer's ended an epoch or the training early, and with this version of "
                "transformers its training can't go on from there: use the version it began with"
            )
        first = trainer._init_training_state

        def init_training_state(*args: Any, **kwargs: Any) -> tuple[int, int]:
            first(*args, **kwargs)
            return begin

        trainer._init_training_state = init_training_state

    def begin(self, step: int, steps: int, loader: Any) -> None:
        """Hear that training begins after ``step``, with so many steps in an epoch of a loader's batches."""
        self._steps, self._all_batches = steps, len(loader)
        self._accumulated = self._trainer.args.gradient_accumulation_steps
        self._epoch, self._batches = self._from or self._default(step)
        if self._batches:
            self._pass_over_begin()
        else:
            self._epoch -= 1

    @property
    def epoch(self) -> int:
        """The number of the epoch that training stands in, from 0."""
        return self._epoch

    @property
    def within_epoch(self) -> bool:
        """Whether some batches of the epoch are trained, and some are not."""
        return 0 < self._batches < self._all_batches

    def begin_epoch(self) -> None:
        """Hear that an epoch begins."""
        self._epoch, self._batches = self._epoch + 1, 0

    def step_to(self, epochs: float) -> None:
        """Hear how many epochs are trained after a step, in parts of one, too."""
        self._batches = round((epochs - self._epoch) * self._all_batches)

    def ends(self, control: TrainerControl) -> bool:
        """Whether the last step is the last of its epoch."""
        stops: bool = control.should_epoch_stop or control.should_training_stop
        return stops or self._batches >= self._all_batches

    def position(self, step: int, control: TrainerControl, *, between: bool) -> dict[str, Any] | None:
        """Where training is to go on, JSON-ready; None where the trainer's own checkpoint tells it.

        :param between: whether the epoch of ``step`` has ended.
        """
        over = bool(control.should_training_stop)
        left = over and self._batches < self._all_batches
        now = (self._epoch + 1, 0) if between and not left else (self._epoch, self._batches)
        as_planned = not left and step >= self._trainer.state.max_steps
        if now == self._default(step) and (as_planned or not over):
            return None
        return {"epoch": now[0], "batches": now[1], "over": over}

    def _default(self, step: int) -> tuple[int, int]:
        return step // self._steps, step % self._steps * self._accumulated

    def _pass_over_begin(self) -> None:
        """Tell callbacks nothing of the begin of an epoch that they heard of before training was stopped."""
        handler = self._trainer.callback_handler
        tell = handler.on_epoch_begin

        def on_epoch_begin(args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
            handler.on_epoch_begin = tell
            control.should_epoch_stop = False
            return control

        handler.on_epoch_begin = on_epoch_begin
