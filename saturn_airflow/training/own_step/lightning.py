"""Lightning's ``LightningModule`` without its ``Trainer``: what it asks of one, Saturn answers or refuses.

A model of plain torch needs nothing of this. The names of attributes and methods are those of Lightning 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    pass

#: What every LightningModule has of its own, or gets from :func:`attach`.
ATTRIBUTES = frozenset(
    (
        *("_trainer", "_fabric", "_fabric_optimizers", "_example_input_array", "_automatic_optimization"),
        *("_current_fx_name", "_param_requires_grad_state", "_metric_attributes", "_compiler_ctx"),
        *("_log_hyperparams", "_dtype", "_device", "_device_mesh", "_jit_is_scripting", "_strict_loading"),
        *("_hparams", "_hparams_name", "_hparams_initial", "prepare_data_per_node"),
        *(
            "allow_zero_length_dataloader_with_multiple_devices",
            "_should_prevent_trainer_and_dataloaders_deepcopy",
        ),
        *("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "all_gather", "trainer"),
        *("clip_gradients", "print"),
    )
)


def is_lightning(model: nn.Module) -> bool:
    """Whether ``model`` is a LightningModule, of either of its two packages."""
    return any(
        cls.__name__ == "LightningModule" and "lightning" in cls.__module__ for cls in type(model).__mro__
    )
