"""Whatever lies in the folder of leases, it crashes nobody, and what is valid stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.launch import leases
from saturn_airflow.launch.leases import Waiter

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "holder": ANYTHING
        | st.fixed_dictionaries({}, optional={"who": ANYTHING, "pid": ANYTHING, "since": ANYTHING}),
        "wanted": ANYTHING | st.lists(st.sampled_from(["a", "b", 1]), max_size=4),
        "need": ANYTHING | st.integers(-1, 5),
        "priority": ANYTHING | st.lists(st.floats() | st.integers(), min_size=2, max_size=2),
        "who": ANYTHING,
        "pid": ANYTHING,
        "since": ANYTHING,
    },
)
CONTENT = st.binary(max_size=60) | (ANYTHING | NEARLY).map(lambda data: json.dumps(data).encode())


@pytest.mark.slow
@given(contents=st.lists(CONTENT, min_size=4, max_size=12), locked=st.booleans())
@settings(max_examples=int(os.environ.get("SATURN_FUZZ_EXAMPLES", "60")), deadline=None)
def test_damaged_tickets_and_devices(contents: list[bytes], locked: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        folder = Path(scratch)
        lease = opened.enter_context(leases.acquire(["held"], "valid", folder=folder))
        waiter = opened.enter_context(contextlib.closing(Waiter(["held"], "waits", folder=folder)))
        for number, content in enumerate(contents):
            name = f"tickets/{number:032x}" if number % 2 else f"devices/d{number}"
            (folder / name).write_bytes(content)
            if locked:
                file = os.open(folder / name, os.O_RDONLY)
                opened.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX)
        assert leases.holders(folder)["held"].who == "valid"
        assert "waits" in [holder.who for holder in leases.waiters(folder)]
        for what in leases.ignored(folder):
            assert what.isprintable()
        assert waiter.take() is None
        lease.release()
        if not locked:
            taken = waiter.take()
            assert taken is not None
            taken.release()
            assert list((folder / "tickets").iterdir()) == []
            assert len(list((folder / "devices").iterdir())) == 1 + (len(contents) + 1) // 2
