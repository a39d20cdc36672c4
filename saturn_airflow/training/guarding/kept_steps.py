"""Plain steps as bytes, so that other guards need not take them again.

They are written as tensors and plain values, and nothing but such is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch

from saturn_airflow.training.guarding.first_steps import PlainSteps
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import Sample, Samples

_DIGEST = 16  # bytes


def dumped(plain: PlainSteps) -> bytes:
    """``plain``, as :func:`loaded` takes it."""
    values = {**vars(plain), "sizes": list(plain.sizes), "skipped": sorted(plain.skipped)}
    values["steps"] = list(map(_of_step, plain.steps))
    written = io.BytesIO()
    torch.save(values, written)
    return _digest(written.getvalue()) + written.getvalue()


def loaded(written: bytes) -> PlainSteps | None:
    """What :func:`dumped` wrote; None where it is damaged."""
    digest, written = written[:_DIGEST], written[_DIGEST:]
    if digest != _digest(written):  # which torch does not look at
        return None
    values = torch.load(io.BytesIO(written), weights_only=True)
    steps = list(map(_step, values["steps"]))
    return PlainSteps(**{**values, "skipped": set(values["skipped"]), "steps": steps})


def _digest(written: bytes) -> bytes:
    return hashlib.blake2b(written, digest_size=_DIGEST).digest()


def _of_step(step: Step) -> dict[str, Any]:
    gradients, buffers = _of_samples(step.gradients), _of_samples(step.buffers)
    stateful, counts = sorted(step.stateful), dict(step.counts)
    values = {**vars(step), "gradients": gradients, "buffers": buffers}
    return {**values, "stateful": stateful, "counts": counts, "unclipped": _of_samples(step.unclipped)}


def _step(values: Mapping[str, Any]) -> Step:
    gradients, buffers = _samples(values["gradients"]), _samples(values["buffers"])
    found = {"gradients": gradients, "buffers": buffers, "unclipped": _samples(values["unclipped"])}
    return Step(**{**values, **found, "stateful": frozenset(values["stateful"])})


def _of_samples(samples: Samples) -> dict[str, Any]:
    return {name: None if one is None else dataclasses.asdict(one) for name, one in samples.items()}


def _samples(values: Mapping[str, Any]) -> dict[str, Sample | None]:
    return {name: None if one is None else Sample(**one) for name, one in values.items()}
