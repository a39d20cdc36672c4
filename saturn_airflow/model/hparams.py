"""How a job is trained: its hyper-parameters. Plain data that fits in JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import references
from saturn_airflow.model.arguments import checked, is_int, json_mapping, number
from saturn_airflow.model.early_stopping import EarlyStopping
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plain_numbers import is_number
from saturn_airflow.model.references import Reference

PRECISIONS = ("float32", "tf32", "bf16", "float64")
#: References by what people write instead.
EXAMPLES = {
    "optimizer": "torch.optim:AdamW",
    "parameter_groups": "shop.models:parameter_groups",
    "lr_scheduler": "torch.optim.lr_scheduler:CosineAnnealingLR",
    **{n.lower(): f"torch.optim:{n}" for n in ("Adam", "AdamW", "Adafactor", "Muon", "RMSprop", "SGD")},
}
#: Classes of torch's that the training loop can't step.
_REFUSED = {
    "optimizer": {"LBFGS": "computes the loss several times a step; choose another"},
    "lr_scheduler": {
        "ReduceLROnPlateau": "waits for a metric, and schedulers are stepped once a batch; choose another"
    },
}


# What hyper-parameters say of an optimizer.
_OF_OPTIMIZERS = (
    *("optimizer", "lr", "optimizer_args", "parameter_groups"),
    *("lr_scheduler", "lr_scheduler_args"),
)


@checked("hparams", max_steps="batches", gradient_accumulation_steps="accumulate")
@dataclass(frozen=True, kw_only=True)
class HParams:
    """How a job is trained. The global batch and the maths never depend on the strategy.

    :param epochs: passes over the data; give ``epochs`` or ``batches``, not both (default: one epoch).
    :param batches: optimizer steps to train for, however many epochs that takes; also ``max_steps``.
    :param batch_size: samples in one *global* batch; handed to ``load_dataloader`` as ``batch_size``.
        Without it the dataloader's own batch size counts.
    :param optimizer: reference of a ``torch.optim.Optimizer`` class.
    :param lr: learning rate.
    :param optimizer_args: further keyword arguments of the optimizer. torch's fused kernels are used where
        there are some, unless these say ``fused=False``; on weights in 16 bits they round less than others.
    :param parameter_groups: reference of a function that takes the model and returns the optimizer's
        parameter groups, as ``torch.optim`` describes them.
    :param lr_scheduler: reference of a ``torch.optim.lr_scheduler`` class, stepped once per optimizer step.
        May be a function of the optimizer, such as ``transformers:get_linear_schedule_with_warmup``.
    :param lr_scheduler_args: its keyword arguments. Where it asks for ``total_steps`` or
        ``num_training_steps`` and they are left out, it is given those of the whole job.
    :param clip_grad_norm: the gradient's largest L2 norm (``torch.nn.utils.clip_grad_norm_``), of all that
        has a gradient in a step: what is in no parameter group counts too.
    :param accumulate: into how many micro-batches each global batch is cut, which are computed in turn; at
        most ``batch_size``; also ``gradient_accumulation_steps``. Other libraries' batch size is often that
        of a micro-batch: ``batch_size`` is that times this.
    :param precision: ``"float32"``; ``"tf32"`` for float32 whose products GPUs round to TensorFloat-32;
        ``"bf16"`` for bfloat16 autocast with float32 weights; ``"float64"``.
    :param compile: compile the model with ``torch.compile``.
    :param seed: seeds the model's initialisation, the order of the data, and dropout.
    :param early_stopping: an :class:`EarlyStopping`, to end the job when it becomes no better.
    """

    epochs: int | None = None
    batches: int | None = None
    batch_size: int | None = None
    optimizer: Reference = "torch.optim:AdamW"
    lr: float = 1e-3
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    parameter_groups: Reference | None = None
    lr_scheduler: Reference | None = None
    lr_scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    clip_grad_norm: float | None = None
    accumulate: int = 1
    precision: str = "float32"
    compile: bool = False
    seed: int = 0
    early_stopping: EarlyStopping | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "early_stopping", EarlyStopping.of(self.early_stopping))
        for name in (f.name for f in dataclasses.fields(self)):
            object.__setattr__(self, name, number(getattr(self, name), f"hparams: {name}"))
        if self.epochs is not None and self.batches is not None:
            raise InvalidSweepError("hparams: give epochs or batches, not both")
        if self.epochs is None and self.batches is None:
            object.__setattr__(self, "epochs", 1)
        for name in ("epochs", "batches", "batch_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise InvalidSweepError(
                    f"hparams: {name} is {value!r}; it must be a whole number of at least 1"
                )
        if self.batch_size is not None and self.accumulate > self.batch_size:
            raise InvalidSweepError(
                f"hparams: accumulate is {self.accumulate}, into so many parts each batch is cut; batch_size "
                f"is {self.batch_size}; that is what a step takes in all: for parts of that size give "
                f"{self.batch_size * self.accumulate}"
            )
        if not is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise InvalidSweepError(
                f"hparams: seed is {self.seed!r}; it must be a whole number of at least 0, and below 2**63"
            )
        if not is_number(self.lr) or not 0 <= self.lr < math.inf:
            raise InvalidSweepError(f"hparams: lr is {self.lr!r}; it must be a number of at least 0")
        if self.clip_grad_norm is not None and (
            not is_number(self.clip_grad_norm) or not 0 < self.clip_grad_norm < math.inf
        ):
            raise InvalidSweepError(f"hparams: clip_grad_norm is {self.clip_grad_norm!r}; it must be above 0")
        if self.precision not in PRECISIONS:
            raise InvalidSweepError(
                f"hparams: precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}"
            )
        if not isinstance(self.compile, bool):
            raise InvalidSweepError(f"hparams: compile is {self.compile!r}; it must be True or False")
        for name in ("optimizer", "parameter_groups", "lr_scheduler"):
            value = getattr(self, name)
            if value is not None:
                example = EXAMPLES.get(str(value).lower(), EXAMPLES[name])
                object.__setattr__(self, name, references.to_reference(value, f"hparams: {name}", example))
        for name, why_not in _REFUSED.items():
            module, _, class_name = str(getattr(self, name)).partition(":")
            if module.startswith("torch.optim") and class_name in why_not:
                raise InvalidSweepError(f"hparams: {name} is {class_name}, which {why_not[class_name]}")
        for name in ("optimizer_args", "lr_scheduler_args"):
            object.__setattr__(self, name, json_mapping(getattr(self, name), f"hparams: {name}"))

    def of_no_effect(self) -> str | None:
        """A message where these say something of an optimizer, though the model configures its own."""
        for name in _OF_OPTIMIZERS:
            if getattr(self, name) != getattr(DEFAULT, name):
                return (
                    f"hparams: {name} is {getattr(self, name)!r}, which changes nothing where the model has "
                    f"configure_optimizers; give it to the model, in model_args"
                )
        return None


#: Of a job that says none.
DEFAULT = HParams()
