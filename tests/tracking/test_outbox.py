from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.tracking.outbox import Outbox


def kept(outbox: Outbox) -> list[dict[str, object]]:
    return [dict(record) for record, _ in outbox.read(0) if record["kind"] != "torn"]


def test_records_come_back_in_order_and_from_any_offset(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append(*({"kind": "tags", "n": n} for n in range(10)))
    read = outbox.read(0)
    assert [record["n"] for record, _ in read] == list(range(10))
    assert read[-1][1] == outbox.size()
    for n, (_, offset) in enumerate(read):
        assert [record["n"] for record, _ in outbox.read(offset)] == list(range(n + 1, 10))
    assert [record["n"] for record, _ in outbox.read(0, limit=3)] == [0, 1, 2]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_loses_only_the_record_it_was_cut_in(
    tmp_path_factory: object, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("outbox")  # type: ignore[attr-defined]
    records = [
        {"kind": "tags", "name": text} for text in data.draw(st.lists(st.text(), min_size=1, max_size=5))
    ]
    Outbox(folder).append(*records)
    file = folder / "mlflow" / "outbox.jsonl"
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    file.write_bytes(whole[:cut])

    after = Outbox(folder)
    after.append({"kind": "tags", "name": "after"})

    left = kept(after)
    complete = whole[:cut].count(b"\n")
    # A record cut right before its line's end is whole.
    assert left in (
        [*records[:complete], {"kind": "tags", "name": "after"}],
        [*records[: complete + 1], {"kind": "tags", "name": "after"}],
    )
    assert after.read(0)[-1][1] == after.size()


def test_an_unfinished_line_is_not_read_yet(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append({"kind": "tags"})
    size = outbox.size()
    with (tmp_path / "mlflow" / "outbox.jsonl").open("a") as file:
        file.write('{"kind": "ta')
    assert [offset for _, offset in outbox.read(0)] == [size]


def test_a_full_disk_stops_nobody_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    file = tmp_path / "mlflow" / "outbox.jsonl"
    file.symlink_to("/dev/full")
    outbox = Outbox(tmp_path)
    outbox.append({"kind": "tags", "n": 0})
    outbox.append({"kind": "tags", "n": 1})
    assert outbox.unwritten

    # The descriptor keeps pointing at the full disk; give it room, as a cleaned disk would.
    real = tmp_path / "real"
    descriptor = os.open(real, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    assert outbox._descriptor is not None
    os.dup2(descriptor, outbox._descriptor)
    file.unlink()
    file.symlink_to(real)

    outbox.append({"kind": "tags", "n": 2})
    assert [record["n"] for record in kept(outbox)] == [0, 1, 2]
    assert not outbox.unwritten


def test_a_write_cut_short_by_a_full_disk_is_repeated_whole(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from saturn_airflow.tracking.outbox import Outbox
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
outbox = Outbox(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
for n in range(20):
    outbox.append({"kind": "tags", "n": n, "text": "x" * 50})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
outbox.append({"kind": "tags", "n": 20})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert [record["n"] for record in kept(Outbox(tmp_path))] == list(range(21))


def test_processes_that_append_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    code = """
import sys
from saturn_airflow.tracking.outbox import Outbox
outbox = Outbox(sys.argv[1])
for n in range(500):
    outbox.append({"kind": "tags", "who": sys.argv[2], "n": n, "text": "x" * (n % 97)})
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), who]) for who in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    records = kept(Outbox(tmp_path))
    for who in "abc":
        assert [record["n"] for record in records if record["who"] == who] == list(range(500))


def test_one_process_sends_at_a_time_and_a_dead_one_frees_the_way(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    code = """
import sys, time
from saturn_airflow.tracking.outbox import Outbox
with Outbox(sys.argv[1]).sole_sender() as sole:
    print(sole, flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with outbox.sole_sender() as sole:
        assert not sole
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with outbox.sole_sender() as sole:
        assert sole


def test_what_was_sent_is_noted_and_a_damaged_note_means_sending_again(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    assert outbox.state() == {}
    outbox.append({"kind": "tags"})
    outbox.note({"offset": 12})
    assert Outbox(tmp_path).state() == {"offset": 12}
    (tmp_path / "mlflow" / "sent.json").write_text('{"offset": ')
    assert Outbox(tmp_path).state() == {}


def test_the_last_record_of_a_name_is_found(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    assert outbox.last("metrics", "step") is None
    outbox.append(
        {"kind": "metrics", "name": "step", "step": 1}, {"kind": "metrics", "name": "step", "step": 2}
    )
    outbox.append({"kind": "metrics", "name": "eval", "step": 9}, {"kind": "tags"})
    assert (outbox.last("metrics", "step") or {})["step"] == 2


def test_refused_records_are_put_aside_with_the_reason(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append({"kind": "tags"})
    outbox.refuse({"kind": "tags", "values": {"a": "b"}}, "too long")
    aside = json.loads((tmp_path / "mlflow" / "refused.jsonl").read_text())
    assert aside == {"reason": "too long", "record": {"kind": "tags", "values": {"a": "b"}}}
