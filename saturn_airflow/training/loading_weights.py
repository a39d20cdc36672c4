"""Starting a job from the weights of another model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import state, storing

# Names that a message shows of each kind.
_SHOWN = 3


def start_from(model: nn.Module, job: Job, path: str) -> None:
    """Give ``model``, which is whole and on the CPU, the weights in a safetensors file, if its job says so.

    Parameters and persistent buffers, and nothing else: neither the optimizer's state nor plain attributes.
    Numbers are converted to the formats that the model has.

    :param path: the file that ``job.init_from`` means.
    :raises JobError: when it can't be read, or its names and shapes are not the model's.
    """
    if job.init_from is None:
        return
    what = f"job {job.name!r} starts from {job.init_from}"
    try:
        with safe_open(path, "pt") as file:
            saved = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            own = _tensors(model)
            _check(own, saved, what)
            with torch.no_grad():
                for names, tensor in own:
                    (name,) = (name for name in names if name in saved)
                    loaded = file.get_tensor(name)
                    if loaded.dtype.is_floating_point != tensor.dtype.is_floating_point:
                        raise JobError(f"{what}, where {name!r} is {loaded.dtype}; here it is {tensor.dtype}")
                    storing.restore(tensor, storing.stored(loaded.to(tensor.dtype)))
    except (OSError, SafetensorError) as error:
        raise JobError(f"{what}, and {path} can't be read ({error})") from None


def _tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each parameter and persistent buffer with its names; tied ones have several."""
    persistent = set(model.state_dict(keep_vars=True))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in persistent}
    names: dict[str, list[str]] = {}
    for name, first in state.aliases(model).items():
        if name in parameters or name in buffers:
            names.setdefault(first, []).append(name)
    return [(found, {**parameters, **buffers}[found[0]]) for found in names.values()]


def _check(own: Sequence[tuple[list[str], torch.Tensor]], saved: dict[str, object], what: str) -> None:
    known = {name for names, _ in own for name in names}
    kept = {names[0]: [name for name in names if name in saved] for names, _ in own}
    shapes = {name: list(value.get_shape()) for name, value in saved.items()}  # type: ignore[attr-defined]
    missing = [name for name, found in kept.items() if not found]
    differing = [
        f"{name!r} {shapes[name]} there and {list(tensor.shape)} here"
        for names, tensor in own
        for name in kept[names[0]]
        # Checkpoints give a dimension to what has none.
        if (shapes[name] or [1]) != (list(tensor.shape) or [1])
    ]
    several = [f"{' and '.join(map(repr, found))} are one here" for found in kept.values() if len(found) > 1]
    found = [
        *_some("it lacks", [repr(name) for name in missing]),
        *_some("the model has no", [repr(name) for name in saved if name not in known]),
        *_some("of other shapes are", differing),
        *_some("tied are", several),
    ]
    if found:
        raise JobError(f"{what}, whose weights are not those of its model: {'; '.join(found)}")


def _some(what: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return [f"{what} {', '.join(items[:_SHOWN])}{more}"]
