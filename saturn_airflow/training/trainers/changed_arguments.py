"""What callbacks change of a Trainer's ``TrainingArguments`` while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saturn_airflow.launch import handed_over
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.model_attributes import is_plain
from saturn_airflow.training.optim import plain_values

#: Arguments that say where and when files are written, which is no part of what is trained.
_DECIDED = {
    "output_dir",
    "logging_dir",
    "save_total_limit",
    "report_to",
    "disable_tqdm",
    "run_name",
    "eval_on_start",
}


class ChangedArguments:
    """The arguments ``args`` (transformers' ``TrainingArguments``), before its Trainer trains."""

    def __init__(self, args: Any) -> None:
        self._args = args
        #: Those that decide the result, as text.
        self.given = _as_text(args)

    def values(self) -> dict[str, Any]:
        """What has changed, JSON-ready.

        :raises JobError: when it can't be kept.
        """
        now = _as_text(self._args)
        found = {}
        for name in sorted(name for name in self.given if now[name] != self.given[name]):
            what = f"TrainingArguments({name}=), which something changes while it trains"
            value = getattr(self._args, name)
            if not is_plain(value, objects=True):
                raise JobError(f"{what}, is a {type(value).__name__}, which no checkpoint can hold")
            found[name] = plain_values.encode(value, what)
        return found

    def set(self, values: Mapping[str, Any]) -> None:
        """Continue with what :meth:`values` told."""
        for name, value in values.items():
            setattr(self._args, name, plain_values.restored(getattr(self._args, name, None), value))


def _as_text(args: Any) -> dict[str, str]:
    told: Mapping[str, Any] = args.to_dict()
    return {name: handed_over.hidden(repr(value)) for name, value in told.items() if name not in _DECIDED}
