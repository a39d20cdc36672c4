"""Which methods of a model with a training step of its own are called, and which are refused by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError

#: What Lightning would call and Saturn does not, so that nothing is left out without a word.
REFUSED = {
    "backward": "call backward in training_step, with automatic_optimization = False",
    "configure_callbacks": "name callbacks on the job",
    "configure_gradient_clipping": "clip in training_step, with automatic_optimization = False",
    "configure_model": "make the model in load_model",
    "configure_sharded_model": "make the model in load_model",
    "lr_scheduler_step": "step the scheduler in training_step, with automatic_optimization = False",
    "on_after_backward": "do it in training_step, with automatic_optimization = False",
    "on_after_batch_transfer": "do it in training_step or in the dataset",
    "on_before_backward": "do it in training_step, with automatic_optimization = False",
    "on_before_batch_transfer": "do it in training_step or in the dataset",
    "on_before_optimizer_step": "do it in training_step, with automatic_optimization = False",
    "on_before_zero_grad": "do it in training_step, with automatic_optimization = False",
    "on_fit_end": "do it in a task after the sweep",
    "on_fit_start": "do it in load_model",
    "on_load_checkpoint": "keep what must be kept in buffers: Saturn's checkpoints have them",
    "on_save_checkpoint": "keep what must be kept in buffers: Saturn's checkpoints have them",
    "on_train_end": "do it in a task after the sweep",
    "on_train_start": "do it in load_model",
    "on_validation_batch_end": "do it in validation_step",
    "on_validation_batch_start": "do it in validation_step",
    "on_validation_end": "do it in on_validation_epoch_end",
    "on_validation_model_eval": "Saturn calls eval() and train() itself",
    "on_validation_model_train": "Saturn calls eval() and train() itself",
    "on_validation_model_zero_grad": "Saturn has no gradients there",
    "on_validation_start": "do it in on_validation_epoch_start",
    "optimizer_step": "call step in training_step, with automatic_optimization = False",
    "optimizer_zero_grad": "call zero_grad in training_step, with automatic_optimization = False",
    "prepare_data": "load the data in load_dataloader",
    "setup": "do it in load_model",
    "teardown": "do it in a task after the sweep",
    "train_dataloader": "name it as the job's load_dataloader",
    "training_epoch_end": "rename it to on_train_epoch_end",
    "training_step_end": "do it in training_step",
    "transfer_batch_to_device": "Saturn puts tensors on the device; do what is left in training_step",
    "val_dataloader": "name it as the job's load_eval_dataloader",
    "validation_epoch_end": "rename it to on_validation_epoch_end",
    "validation_step_end": "do it in validation_step",
}

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric")


def check(model: nn.Module, load_model: str, *, evaluated: bool) -> None:
    """Check that ``model`` has what a training step of its own needs, and nothing that would not be called.

    :param evaluated: whether the job has evaluation data.
    :raises JobError: naming the method.
    """
    what = f"load_model {load_model!r} returned a {type(model).__name__}"
    if not callable(getattr(model, "training_step", None)):
        raise JobError(f"{what}, which has no training_step(batch, batch_idx), as own_step=True wants")
    if evaluated and not is_own(model, "validation_step"):
        raise JobError(
            f"{what}, which has no validation_step(batch, batch_idx), and the job has a load_eval_dataloader"
        )
    for name, instead in REFUSED.items():
        if is_own(model, name):
            raise JobError(f"{what} with {name}, which Saturn does not call; {instead}")


def call(model: nn.Module, name: str, *arguments: Any) -> Any:
    """Call the hook ``name`` of ``model`` if it has one."""
    if not is_own(model, name):
        return None
    with of_the_job(name):
        return getattr(model, name)(*arguments)


def is_own(model: nn.Module, name: str) -> bool:
    """Whether ``model`` has a method ``name`` that is the user's, not one that Lightning gives to all."""
    if name in vars(model):
        return callable(vars(model)[name])
    cls = next((cls for cls in type(model).__mro__ if name in vars(cls)), None)
    return cls is not None and cls.__module__.partition(".")[0] not in _LIBRARIES
