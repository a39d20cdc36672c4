"""Copies of batches that lie in pinned memory, which the host does not wait for when it asks for them.

A loader may write each batch into one and the same memory. In a plain loop, which waits for its copies, that
is safe; so nothing asks a loader for the next batch before what it gave is copied. Most often it is by then.
"""

from __future__ import annotations

from typing import Any

import torch

from saturn_airflow.training.nested import tensors_in

_copied: torch.cuda.Event | None = None


def note(batch: Any, device: torch.device) -> None:
    """Note that ``batch`` is being copied to ``device``, in the stream that is current there."""
    global _copied
    if device.type == "cuda" and any(tensor.is_pinned() for tensor in tensors_in(batch)):
        # Who waits for it on the host sleeps: workers of loaders have work for the core.
        _copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        _copied.record(torch.cuda.current_stream(device))


def wait() -> None:
    """Wait until the last of them is copied; those before it are by then."""
    global _copied
    if _copied is not None:
        _copied.synchronize()
        _copied = None
