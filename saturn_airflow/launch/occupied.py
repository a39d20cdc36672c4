"""Whether GPUs that a run has leased are really free: Saturn's leases bind nobody but Saturn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from saturn_airflow.launch import devices

# The driver's own memory, and what a desktop holds, are no reason to wait.
_FREE_BYTES, _FREE_SHARE = 2**30, 0.05
# The memory of a process that was killed is freed within seconds.
_WAIT_SECONDS = 10.0


def wait_until_free(uuids: Sequence[str], poll: Callable[[], bool], seconds: float = _WAIT_SECONDS) -> str:
    """Wait for the memory of these GPUs to be freed by whoever had them.

    :param poll: called five times a second; True ends the waiting.
    :param seconds: how long to wait at most.
    :returns: who is still in the way, as a sentence; empty where nobody is.
    """
    give_up_at = time.monotonic() + seconds
    while True:
        in_use = {
            uuid: used
            for uuid, (used, total) in devices.used_bytes(uuids).items()
            if used > max(_FREE_BYTES, _FREE_SHARE * total)
        }
        if not in_use:
            return ""
        if time.monotonic() > give_up_at:
            told = ", ".join(f"{used / 2**30:.1f} GiB of {uuid}" for uuid, used in in_use.items())
            return f"{told} are in use by processes that are not Saturn's; what fits and how fast will be off"
        if poll():
            return ""
        time.sleep(0.2)
