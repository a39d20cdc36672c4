"""Plain steps as bytes, so that other guards need not take them again.

Of what is read, nothing but such steps, tensors and plain values is made.
"""

from __future__ import annotations

import hashlib
import io

import torch

from saturn_airflow.training.guarding.first_steps import PlainSteps
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import Sample

_DIGEST = 16  # bytes


def dumped(plain: PlainSteps) -> bytes:
    """``plain``, as :func:`loaded` takes it."""
    written = io.BytesIO()
    torch.save(plain, written)
    return _digest(written.getvalue()) + written.getvalue()


def loaded(written: bytes) -> PlainSteps | None:
    """What :func:`dumped` wrote; None where it is damaged."""
    digest, written = written[:_DIGEST], written[_DIGEST:]
    if digest != _digest(written):  # which torch does not look at
        return None
    with torch.serialization.safe_globals([PlainSteps, Step, Sample, set, frozenset]):
        plain: PlainSteps = torch.load(io.BytesIO(written), weights_only=True)
    return plain


def _digest(written: bytes) -> bytes:
    return hashlib.blake2b(written, digest_size=_DIGEST).digest()
