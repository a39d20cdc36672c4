"""Launching processes that are warm, watched, and gone when whoever launched them is gone.

They are forked from a server that has imported torch and has never run anything (multiprocessing's
forkserver), so that starting one takes a few hundredths of a second and CUDA is never touched before a fork.
Each has a pipe to the launcher: it says over it what happens, hears over it when to stop, and ends itself
when the pipe breaks. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import connection, forkserver, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from saturn_airflow.launch import failures, forked, handed_over, host_memory
from saturn_airflow.launch.failures import Failure, RanksFailedError
from saturn_airflow.launch.forked import Forked
from saturn_airflow.launch.standstill import Standstill, is_held_up
from saturn_airflow.model import references
from saturn_airflow.model.status import Status

Event = dict[str, Any]

#: Where files of launches are; the folder for temporary files by default. A supervisor names one that goes
#: with it, however it ends.
scratch: str | None = None

# After the first failure the others may still say what they saw; where all that failed so far lost a peer,
# the peer has yet to say why.
_GRACE_SECONDS = 1.0
_GRACE_SECONDS_FOR_THE_CULPRIT = 5.0


# Who looks ten times a second and has not for so long was held up.
_ASLEEP_SECONDS = 10.0
# Steps that follow each other faster are sent together: to wake the launcher takes as long as many a step.
_TOGETHER_SECONDS = 0.1


class Link:
    """A launched process's end of its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._process = os.getpid()
        self._stop = threading.Event()
        #: Whether somebody asked whether to stop, and was told to.
        self.told_to_stop = False
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._last_sent = 0.0
        self._stepping = False
        self._steps: list[Event] = []
        threading.Thread(target=self._listen, name="saturn-link", daemon=True).start()

    def emit(self, event: Event) -> None:
        """Report what happened; of a ``step`` that follows another, a tenth of a second later at most."""
        self._end_copies()
        follows, self._stepping = self._stepping, event.get("event") == "step"
        if follows and self._stepping and time.monotonic() - self._last_sent < _TOGETHER_SECONDS:
            with self._sending:
                self._steps.append(event)
        else:
            self._send(("events", event))

    def stop_requested(self) -> bool:
        """Whether the launcher wants this process to stop; asking shows that it is alive."""
        self._end_copies()
        if time.monotonic() - self._last_sent > 0.5:
            self._send(("alive",))
        self.told_to_stop = self._stop.is_set()
        return self.told_to_stop

    def request(self, what: Any) -> Any:
        """Ask the launcher for something and wait for the answer."""
        self._send(("request", what))
        return self._replies.get()

    def wait_until_recorded(self) -> None:
        """Wait until the launcher has dealt with all that was reported."""
        self._send(("heard",))
        self._replies.get()

    def end(self, kind: str, value: Any) -> None:
        """The last word: ``result`` or ``failure``."""
        self._send((kind, value))

    def _end_copies(self) -> None:
        if os.getpid() != self._process:
            forked.end_copy()

    def _send(self, *messages: tuple[Any, ...]) -> None:
        """Send these messages, and before them the steps that were held back."""
        with self._sending:
            if steps := self._steps:
                self._steps = []
                self._pipe.send(("events", *steps))
            for message in messages:
                self._pipe.send(message)
            self._last_sent = time.monotonic()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                while not self._pipe.poll(_TOGETHER_SECONDS):
                    if self._steps:
                        self._send()
                kind, *value = self._pipe.recv()
                if kind == "stop":
                    self._stop.set()
                else:
                    self._replies.put(value[0])
        os.kill(os.getpid(), signal.SIGKILL)


def launch(
    entry: str,
    arguments: Sequence[Sequence[Any]],
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    on_request: Callable[[Any, Callable[[], bool]], Any] | None = None,
    poll: Callable[[], bool] = lambda: False,
    hang_seconds: float | None = None,
    keep_open: Sequence[int] = (),
) -> list[Any]:
    """Run ``entry(link, *arguments[i])`` in a process each and wait for all of them.

    :param entry: ``"module:function"``.
    :param arguments: for each process what it is called with; must pickle.
    :param on_event: called here with every event they emit.
    :param on_request: answers :meth:`Link.request`; its second argument says whether the asker still lives.
    :param poll: called ten times a second; True asks all processes to stop, an exception ends them.
    :param hang_seconds: when a process gave no sign of life for this long, it hangs.
    :param keep_open: open files that the processes inherit, such as leases.
    :returns: what each call returned.
    :raises RanksFailedError: when one of them failed; the others are ended.
    """
    before = host_memory.kernel_kills()
    group = _Group(entry, arguments, keep_open)
    try:
        asked_to_stop, looked_at = False, time.monotonic()
        while not group.ended():
            for member, message in group.messages(timeout=0.1):
                if message[0] == "events":
                    for event in message[1:]:
                        on_event(event)
                elif message[0] == "heard":
                    member.tell(("reply", None))
                elif message[0] == "request":
                    assert on_request is not None
                    member.tell(("reply", on_request(message[1], member.process.is_alive)))
                    group.touch()
            for told in group.held_up():
                on_event({"event": "warning", "message": told})
            try:
                stop = poll()
            except RanksFailedError as error:
                raise RanksFailedError(group.placed(error.failure)) from None
            if stop and not asked_to_stop:
                asked_to_stop = True
                group.tell(("stop",))
            slept, looked_at = time.monotonic() - looked_at > _ASLEEP_SECONDS, time.monotonic()
            if slept:  # whatever held this process up, as where a container is frozen, held them up, too
                group.touch()
            if hang_seconds is not None and (failure := group.hung(hang_seconds)):
                raise RanksFailedError(failure)
        if failure := group.first_failure(host_memory.kernel_kills() > before):
            raise RanksFailedError(failure)
        return [member.result for member in group.members]
    finally:
        group.end()


def launch_ranks(
    call: bytes,
    size: int,
    *,
    device_type: str = "cpu",
    threads: int = 1,
    technique: str = "",
    hang_seconds: float = 1800.0,
    **watching: Any,
) -> list[dict[str, Any]]:
    """Run a function on ``size`` ranks that share a process group.

    :param call: what :func:`pack` made: the function, called as ``function(*arguments, ranks)``.
    :param device_type: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL; rank i takes visible GPU i).
    :param threads: CPU threads of each rank.
    :param technique: its file is imported before the function is looked up.
    :param watching: as for :func:`launch`.
    :returns: for each rank ``value`` (what the function returned), ``peak_device_bytes``,
        ``peak_host_bytes``, ``launch_seconds`` and ``told_to_stop`` (whether it asked, and was told to).
    :raises RanksFailedError: for the rank that failed first.
    """
    folder = tempfile.mkdtemp(prefix="saturn-ranks-", dir=_scratch())
    meeting = f"file://{folder}/meeting"
    try:
        settings = (size, meeting, device_type, threads, technique, hang_seconds, time.monotonic(), call)
        arguments = [(rank, *settings) for rank in range(size)]
        return launch("saturn_airflow.training.ranks:run", arguments, hang_seconds=hang_seconds, **watching)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _scratch() -> str | None:
    """Where files of launches go; by default where somebody has cleaned :data:`scratch` away."""
    return scratch if scratch is not None and os.path.isdir(scratch) else None


def pack(function: Callable[..., Any] | str, *arguments: Any) -> bytes:
    """A call as bytes: a module-level function or its ``"module:name"``, and arguments that pickle."""
    return pickle.dumps((function, arguments))


def unpack(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call that :func:`pack` made."""
    function, arguments = pickle.loads(call)
    return references.resolve(function) if isinstance(function, str) else function, arguments


class _Member:
    """The launcher's view of one launched process."""

    def __init__(self, number: int, entry: str, arguments: Sequence[Any], keep_open: Sequence[int]) -> None:
        self.number = number
        stack, self.stack_path = tempfile.mkstemp(prefix="saturn-stack-", dir=_scratch())
        os.close(stack)
        self.pipe, theirs = connection.Pipe()
        what = (handed_over.kept(), entry, tuple(arguments), theirs)
        self.process: ForkServerProcess | Forked
        if forked.may_fork:
            self.process = Forked(_main, (*what, self.stack_path, number), [theirs.fileno(), *keep_open])
        else:
            forkserver.set_forkserver_preload(["saturn_airflow.launch.warm_server"])
            self.process = multiprocessing.get_context("forkserver").Process(
                target=_main_with_files, args=(_Files(keep_open), *what, self.stack_path, number)
            )
            self.process.start()
        theirs.close()
        self.alive_at = time.monotonic()
        self.standstill = Standstill(lambda: self.process.pid)
        self.failed_at = float("inf")
        self.ended = False
        self.result: Any = None
        self.failure: Failure | None = None

    def tell(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """What it has said and not yet been heard of."""
        # Asked first: what it said last is read before it counts as gone.
        alive = self.process.is_alive()
        try:
            while not self.ended and self.pipe.poll():
                message = self.pipe.recv()
                self.alive_at = time.monotonic()
                if message[0] == "result":
                    self.result, self.ended = message[1], True
                elif message[0] == "failure":
                    self.failure, self.failed_at = message[1]
                    self.ended = True
                else:
                    yield message
        except (EOFError, OSError):
            pass
        if not self.ended and not alive:
            self.ended, self.failed_at = True, time.monotonic()

    def where(self) -> str:
        """Where it stands now, by its own stack."""
        with contextlib.suppress(OSError):
            pid = self.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        text, is_whole = "", False
        while not is_whole and time.monotonic() < deadline:
            time.sleep(0.05)
            before = text
            with contextlib.suppress(OSError):  # somebody has cleaned it away
                text = Path(self.stack_path).read_text()
            is_whole = bool(text) and text == before
        # The main thread's stack comes last.
        return text[max(text.rfind("Thread 0x"), text.rfind("Current thread 0x"), 0) :].strip()

    def end(self) -> None:
        if self.process.is_alive():
            # Who has said all it had to say may still be closing its files.
            self.process.join(2.0 if self.ended and self.failure is None else 0.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5.0)
        self.pipe.close()
        Path(self.stack_path).unlink(missing_ok=True)


class _Group:
    """All processes of one launch."""

    def __init__(self, entry: str, arguments: Sequence[Sequence[Any]], keep_open: Sequence[int]) -> None:
        self.members: list[_Member] = []
        try:
            for number, own in enumerate(arguments):
                self.members.append(_Member(number, entry, own, keep_open))
        except BaseException:
            self.end()
            raise

    def ended(self) -> bool:
        """Whether all have ended, or one has failed and the others had time to say why they failed."""
        failed = [member for member in self.members if member.failed_at < float("inf")]
        if not failed or all(member.ended for member in self.members):
            return all(member.ended for member in self.members)
        echoes = all(member.failure is not None and member.failure.peer_lost for member in failed)
        grace = _GRACE_SECONDS_FOR_THE_CULPRIT if echoes else _GRACE_SECONDS
        return time.monotonic() > min(member.failed_at for member in failed) + grace

    def messages(self, timeout: float) -> Iterator[tuple[_Member, tuple[Any, ...]]]:
        running = [member for member in self.members if not member.ended]
        watched: list[Any] = [member.pipe for member in running]
        watched += [member.process.sentinel for member in running]
        connection.wait(watched, timeout)
        for member in running:
            for message in member.messages():
                yield member, message

    def tell(self, message: tuple[Any, ...]) -> None:
        for member in self.members:
            member.tell(message)

    def touch(self) -> None:
        for member in self.members:
            member.alive_at = time.monotonic()

    def held_up(self) -> Iterator[str]:
        """What is to be said of processes that a signal holds up."""
        for member in self.members:
            if not member.ended and (told := member.standstill.look()):
                yield f"rank {member.number}: {told}"

    def hung(self, seconds: float) -> Failure | None:
        """The failure where a process gave no sign of life for so long, None where all did."""
        running = [member for member in self.members if not member.ended]
        if all(time.monotonic() - member.alive_at < seconds for member in running):
            return None
        for member in running:
            if is_held_up(member.process.pid or 0):
                reason = f"rank {member.number} was held up by a signal for {seconds:g} s"
                return Failure(status=Status.LOST, reason=reason, rank=member.number, signal="SIGSTOP")
        member, stack = self._stuck(running)
        reason = f"rank {member.number} has not moved for {seconds:g} s"
        return Failure(status=Status.HUNG, reason=reason, traceback=stack, rank=member.number)

    def placed(self, failure: Failure) -> Failure:
        """``failure``, of processes that take too long, with where they stand."""
        running = [member for member in self.members if not member.ended]
        if failure.status != Status.HUNG or failure.traceback or not running:
            return failure
        member, stack = self._stuck(running)
        return replace(failure, traceback=stack, rank=member.number)

    def _stuck(self, running: list[_Member]) -> tuple[_Member, str]:
        """The one that hangs, and its stack; the others wait for it, inside torch.distributed."""
        stacks = [(member, member.where()) for member in sorted(running, key=lambda m: m.alive_at)]
        elsewhere = [s for s in stacks if "torch/distributed" not in s[1]]
        # One that has not said where it is may be any of them.
        return max(elsewhere, key=lambda s: bool(s[1])) if elsewhere else stacks[0]

    def first_failure(self, kernel_killed: bool) -> Failure | None:
        """What went wrong first: a process that died, else the first error that isn't another's echo."""
        failed = sorted((m for m in self.members if m.failed_at < float("inf")), key=lambda m: m.failed_at)
        for member in failed:
            if member.failure is None:
                return failures.of_a_death(member.number, member.process.exitcode, kernel_killed)
        told = [member.failure for member in failed if member.failure is not None]
        return next((failure for failure in told if not failure.peer_lost), told[0] if told else None)

    def end(self) -> None:
        for member in self.members:
            if not member.ended or member.failure is not None:
                member.process.kill()
        for member in self.members:
            member.end()


class _Files:
    """Open files that travel to the launched process and stay open there."""

    def __init__(self, files: Sequence[int]) -> None:
        self.files = list(files)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ([reduction.DupFd(file) for file in self.files],)


def _received(files: list[Any]) -> _Files:
    return _Files([file.detach() for file in files])


def _main_with_files(files: _Files, *arguments: Any) -> None:
    forget_start_method()
    _main(*arguments)
    del files


def forget_start_method() -> None:
    """Let what this process starts begin as in a program that was started by hand.

    Processes inherit the way in which they were started. Workers of a DataLoader that are not forked lack
    what ``load_dataloader`` has set among the global variables of its module.
    """
    multiprocessing.set_start_method(None, force=True)


def _main(
    handed: handed_over.HandedOver,
    entry: str,
    arguments: tuple[Any, ...],
    pipe: Connection,
    stack_path: str,
    number: int,
) -> None:
    """What a launched process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handed_over.receive(handed)
    with open(stack_path, "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        link = Link(pipe)
        try:
            with forked.in_one_process():
                result = references.resolve(entry)(link, *arguments)
            link.end("result", result)
        except BaseException as error:  # the launcher tells the user
            link.end("failure", (failures.describe(error, number), time.monotonic()))
        faulthandler.unregister(signal.SIGUSR1)
