"""The small process that a run's ranks live under: it is started as this module, with a folder and a pid.

It waits for the devices, shows them alone to the processes it launches, passes on what happens and what is
asked, and sees to it that nothing stays behind. It never runs a user's code, and has torch only where it was
forked from what has imported it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from saturn_airflow.launch import (
    descendants,
    devices,
    event_file,
    failures,
    file_locks,
    followers,
    forked,
    handed_over,
    job_log,
    launching,
    leases,
    process_above,
    scratch,
    technique_call,
    warm,
)
from saturn_airflow.launch.emitted import ReportedResult
from saturn_airflow.launch.failures import Failure, RanksFailedError
from saturn_airflow.launch.giving_way import TurnsOfRun
from saturn_airflow.launch.host_memory import Watch
from saturn_airflow.launch.kept_lease import LeaseLostError
from saturn_airflow.launch.output_limit import OutputLimit
from saturn_airflow.launch.own_training import result_of
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.restarts import Restarts
from saturn_airflow.launch.run_spec import RunSpec, read_spec
from saturn_airflow.launch.standstill import Standstill
from saturn_airflow.launch.trial_clock import TrialClock
from saturn_airflow.model import formats
from saturn_airflow.model.errors import DeviceError, InvalidSweepError
from saturn_airflow.model.status import Status

# A run that must not outlive its starter has this long to save what it has when the starter is gone.
_STARTER_GONE_SECONDS = 3.0
# A run that nobody came back to may take its time: nobody waits for it.
_NOBODY_WAITS_SECONDS = 300.0
# How long the end of a run waits for a full disk to have room for it.
_LAST_WORDS_SECONDS = 30.0
# Between two looks whether the run's folder is still there.
_LOOK_SECONDS = 0.5
# A task that follows the run and is held up by a signal for so long is ended: its next try follows the run.
# Airflow sees no more than that the process above it lives.
_FOLLOWER_SECONDS = 60.0
# A trial keeps to its time by itself; one that does not is ended this much later.
_TRIAL_GRACE_SECONDS = 5.0


class StoppedError(Exception):
    """The run was asked to stop and ended before it could say more."""


class _TechniqueGoneError(Exception):
    """The technique's own process is gone, and its ranks with it."""


class Supervisor:
    """One run, from waiting for its devices to its end.

    :param starter: the process that started it, as a file that becomes readable when it is gone; None where
        it is gone already.
    """

    def __init__(self, folder: Path, starter: int | None) -> None:
        self._folder = folder
        self._starter = starter
        self._spec = read_spec(folder)
        self._follower = Standstill(lambda: followers.follower(self._spec.folder))
        self._place, self._looked_at = _identity(folder / "alive"), time.monotonic()
        self._output = OutputLimit(folder / "output.log")
        # At the end, as Airflow does, so that a user's queue.py hides no module of Python's. Whatever is
        # launched from here searches the same path.
        sys.path.extend(entry for entry in self._spec.path if entry not in sys.path)
        self._events = os.open(folder / event_file.NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._unwritten, self._said = b"", 0
        self._stop_by: float | None = None
        self._deadline = float("inf")
        self._not_on_the_clock = 0.0
        self._time_is_up = float("inf")
        self._timed_out = self._crowded = self._told_to_stop = False
        self._followed: tuple[float, float] | None = None
        self._memory: Watch | None = None
        self._turn: TurnsOfRun | None = None
        self._turn_began = self._had_seconds = 0.0

    def run(self) -> None:
        """Do what the spec says and write the end of it."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop_within(self._spec.stop_seconds))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        descendants.adopt()
        self.emit({"event": event_file.FORMAT_EVENT, **formats.stamp(event_file.FORMAT)})
        for message in self._spec.warnings:
            self.emit({"event": "warning", "message": message})
        result: dict[str, Any] = {}
        failure: Failure | None = None
        try:
            with contextlib.ExitStack() as held:
                result = self._with_devices(held)
        except StoppedError as stopped:
            result = {"status": Status.STOPPED, "reason": str(stopped)}
        except (DeviceError, InvalidSweepError) as error:
            failure = failures.before_launch(error)
        except RanksFailedError as error:
            failure = error.failure
        except BaseException as error:
            failure = failures.describe(error)
        if failure is None:
            status, reason = result.pop("status", Status.FINISHED), result.pop("reason", "")
            if status == Status.STOPPED and self._timed_out:
                status = Status.TIMED_OUT
                reason = "it had its devices for as long as it may (job_timeout); " + (
                    reason or "it was saved"
                )
            end = {"event": "end", "status": status, "reason": reason, "traceback": "", "result": result}
            self.emit({**end, **forked.cpu_seconds()})
        else:
            by_others = {"occupied": True} if self._crowded and failure.status == Status.OUT_OF_MEMORY else {}
            self.emit({"event": "end", **failure.to_dict(), "result": {}, **by_others})

    def emit(self, event: dict[str, Any]) -> None:
        """Append one line to the run's events; where the disk is full, they wait for room."""
        told = handed_over.hidden_event(event)
        # Somebody may set the clock while a job trains; how long it had its devices is told by the other.
        line = json.dumps({**told, "time": time.time(), "clock": time.monotonic()}, default=str) + "\n"
        self._unwritten += line.encode()
        self._write_events()
        give_up_at = time.monotonic() + _LAST_WORDS_SECONDS
        while self._unwritten and event["event"] == "end" and time.monotonic() < give_up_at:
            time.sleep(0.1)
            self._write_events()

    def _tell_of_others(self, message: str) -> None:
        """Warn that others use the memory of this run's devices or machine; not where that is empty."""
        if message:
            self._crowded = True
            self.emit({"event": "warning", "message": message, "occupied": True})

    def _write_events(self) -> None:
        with contextlib.suppress(OSError):
            # A job's code may write there, too: after half a line of it, what is said would be no line.
            there = os.fstat(self._events).st_size
            if there > self._said and os.pread(self._events, 1, there - 1) != b"\n":
                self._unwritten = b"\n" + self._unwritten
            self._unwritten = self._unwritten[os.write(self._events, self._unwritten) :]
            self._said = os.lseek(self._events, 0, os.SEEK_CUR)

    def _with_devices(self, held: contextlib.ExitStack) -> dict[str, Any]:
        spec = self._spec
        state = held.enter_context(self._hold_state())
        found = devices.find(spec.node, spec.kind, spec.slots)
        wanted = found if spec.device_ids is None else [found[i] for i in spec.device_ids]
        if spec.devices > 1 and any(device.uuid.startswith("MIG-") for device in wanted):
            raise DoesNotFit(
                "parts of split GPUs (MIG) can't train one job together: a process sees but one of them, and "
                "NCCL connects none"
            )
        os.environ["OMP_NUM_THREADS"] = str(devices.threads_per_device(spec.slots))
        job = spec.job
        warm.prepare(map(str, filter(None, [job.load_model, job.load_dataloader, job.loss_function])))

        # A trial is no training: what the job's code logs meanwhile is logged nowhere.
        os.environ[job_log.VARIABLE] = str(Path(spec.folder, job_log.FILES)) if spec.mode == "train" else ""
        turn = TurnsOfRun(spec, tuple(device.name for device in found), self._tell_of_others)
        while True:
            if spec.most_seconds is not None and spec.most_seconds <= self._had_seconds:
                self._timed_out = True
                raise StoppedError("nothing of its time was left for another try")
            with self._lease([device.name for device in wanted], turn) as lease:
                self._begin_turn(turn, lease)
                mine = [found[number] for number in turn.device_ids]
                try:
                    if in_use := devices.wait_until_free([d.uuid for d in mine if d.uuid], self._poll):
                        self._tell_of_others(in_use)
                    if launching.scratch is None:
                        launching.scratch = held.enter_context(scratch.folder())
                        if why := scratch.why_not_compiled_there(Path(launching.scratch)):
                            self.emit({"event": "warning", "message": why})
                        process_above.remove_with_this_process(launching.scratch)
                        held.callback(self._end_leftovers)
                    os.environ.update(devices.environment(mine))
                    try:
                        result = self._with_restarts(turn, [d.id for d in mine], [*lease.files, state])
                    finally:
                        turn.is_over()
                except LeaseLostError:
                    result = {"status": Status.STOPPED}
                if not self._end_turn(turn) or result.get("status") != Status.STOPPED or self._poll():
                    return {**result, **turn.result()}
                descendants.end()
            self.emit({"event": "gave_way", "seconds": turn.left_in})

    def _end_leftovers(self) -> None:
        """End what the job's code has left, and say so where it was to go on by itself."""
        if left := descendants.apart():
            message = f"the job's code left processes behind, which were ended: {', '.join(left)}"
            self.emit({"event": "warning", "message": message})
        descendants.end()

    def _lease(self, wanted: list[str], turn: TurnsOfRun) -> leases.Lease:
        """Wait for the devices of a turn."""
        spec = self._spec
        try:
            return leases.acquire(
                wanted,
                spec.holder,
                count=spec.devices,
                priority=spec.priority,
                folder=self._leases_folder,
                on_wait=lambda holders: self.emit({"event": "waiting", "for": holders}),
                on_ignored=lambda what: self.emit({"event": "warning", "message": f"ignored lease: {what}"}),
                give_up=self._poll,
                sharing=turn.sharing,
            )
        except leases.GivenUpError:
            raise StoppedError("stopped while waiting for its devices") from None

    def _begin_turn(self, turn: TurnsOfRun, lease: leases.Lease) -> None:
        self._turn, self._turn_began = turn, time.monotonic()
        self.emit({"event": "leased", **turn.begin(lease, self._leases_folder)})

    def _end_turn(self, turn: TurnsOfRun) -> bool:
        """Whether the run is to wait for another."""
        self._turn = self._memory = None
        self._time_is_up = self._deadline = float("inf")  # waiting for the next turn is no time on devices
        self._had_seconds += time.monotonic() - self._turn_began
        return turn.ends()

    @property
    def _leases_folder(self) -> Path | None:
        return Path(self._spec.leases_folder) if self._spec.leases_folder else None

    def _with_restarts(self, turn: TurnsOfRun, device_ids: list[int], keep_open: list[int]) -> dict[str, Any]:
        """Call the technique; again, where a process of training is killed; another, where it is refused."""
        leased_at = time.monotonic()
        self._memory = Watch(descendants.others, self._spec.host_memory, turn.spec.devices / turn.spec.slots)
        if self._spec.most_seconds is not None:
            self._time_is_up = leased_at + self._spec.most_seconds - self._had_seconds
        deadline = leased_at + self._spec.trial_seconds
        if self._spec.mode == "trial":
            self._deadline = deadline + _TRIAL_GRACE_SECONDS
        restarts, reported = Restarts(), ReportedResult()

        def tell(event: dict[str, Any]) -> None:
            reported.add(event)
            restarts.note(event)
            turn.note(event)
            self.emit(event)

        while True:
            try:
                spec = replace(turn.spec, batch_count=restarts.batches_left(self._spec.batch_count))
                result = self._call_technique(spec, device_ids[: spec.devices], keep_open, deadline, tell)
                return result_of(result, reported, turn.spec)
            except RanksFailedError as error:
                if error.failure.status == Status.OUT_OF_MEMORY and error.failure.signal:
                    self._tell_of_others(self._memory.modest)
                other = turn.goes_on_after(error.failure, tell, self._crowded)
                if (stops := self._poll()) and other:  # the next run goes on under the other
                    return {"status": Status.STOPPED}
                if stops or not (other or (turn.trains and restarts.allow(error.failure))):
                    raise RanksFailedError(restarts.explain(error.failure)) from None
                descendants.end()
                if not other:
                    self.emit({"event": "restarting", "reason": error.failure.reason})

    def _call_technique(
        self,
        spec: RunSpec,
        device_ids: list[int],
        keep_open: list[int],
        deadline: float,
        tell: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        began, ready_seconds = time.monotonic(), list[float]()

        def launch_ranks(what: Any, asker_is_alive: Callable[[], bool]) -> Any:
            call, ranks, seconds = what
            ready_seconds.append(time.monotonic() - began)
            clock = TrialClock(seconds)

            def hear(event: dict[str, Any]) -> None:
                if clock.hears(event):
                    return
                if event["event"] == "step":
                    self._not_on_the_clock += clock.stepped()
                tell(event)

            def poll() -> bool:
                if not asker_is_alive():
                    # How it ended is told by who launched it.
                    raise _TechniqueGoneError
                if (failure := clock.failure()) is not None:
                    raise RanksFailedError(failure)
                return self._poll(clock.setting_up)

            self.emit({"event": "launched", "ranks": ranks})
            try:
                return launching.launch_ranks(
                    call,
                    ranks,
                    device_type="cpu" if spec.kind == "cpu" else "cuda",
                    threads=devices.threads_per_device(spec.slots),
                    technique=spec.technique,
                    hang_seconds=spec.hang_seconds,
                    on_event=hear,
                    poll=poll,
                    keep_open=keep_open,
                )
            except RanksFailedError as error:
                self._not_on_the_clock += clock.stepped()
                return error.failure
            except _TechniqueGoneError:
                return None

        result = technique_call.call(
            spec,
            device_ids,
            deadline,
            on_event=tell,
            launch_ranks=launch_ranks,
            poll=self._poll,
            keep_open=keep_open,
        )
        return {"ready_seconds": ready_seconds[0] if ready_seconds else 0.0, **result}

    @contextlib.contextmanager
    def _hold_state(self) -> Any:
        """Hold the job's state, so that no two runs ever train one job into one folder."""
        file = os.open(Path(self._spec.folder) / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        waiting = {"event": "waiting", "for": ["an earlier run of the same job"]}
        try:
            if not file_locks.wait_for_lock(file, self._poll, lambda: self.emit(waiting)):
                raise StoppedError("stopped while waiting for an earlier run of the same job")
            yield file
        finally:
            os.close(file)

    def _poll(self, setting_up: bool = False) -> bool:
        """Whether the ranks should stop; raises when they must be ended."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._check_place()
            self._check_follower()
            if printed := self._output.look():
                self.emit({"event": "warning", "message": printed})
            if forked.may_fork:  # else multiprocessing's server waits for children of its own
                descendants.reap(forked.children)
        if now > self._deadline + self._not_on_the_clock and not setting_up:
            reason = f"the trial took longer than {self._spec.trial_seconds:g} s"
            raise RanksFailedError(Failure(status=Status.HUNG, reason=reason, whose="technique"))
        if self._stop_by is None and now > self._time_is_up:
            self._timed_out = True
            self._stop_within(self._spec.stop_seconds)
        if self._stop_by is None and self._is_given_up():
            outlives = self._spec.outlive_seconds != 0
            self._stop_within(_NOBODY_WAITS_SECONDS if outlives else _STARTER_GONE_SECONDS)
        if not self._told_to_stop and (self._folder / "stop").exists():
            self._told_to_stop = True
            self._stop_within(self._spec.stop_seconds)
        if self._memory is not None and (too_much := self._memory.look()):
            if self._memory.crowded:
                self._tell_of_others(too_much)
            raise RanksFailedError(Failure(status=Status.OUT_OF_MEMORY, reason=too_much))
        if self._stop_by is not None and now > self._stop_by:
            raise StoppedError("did not stop in time when asked to, and was ended; its last checkpoint stays")
        return self._stop_by is not None or (self._turn is not None and self._turn.is_to_leave())

    def _check_place(self) -> None:
        """Raise when the folder of this run is there no more, or another one is.

        For all others this run is gone, and they would train its job a second time beside it.
        """
        try:
            if _identity(self._folder / "alive") != self._place:
                raise StoppedError("somebody has taken the folder of this run away")
        except OSError:  # a file server that does not answer has taken nothing away
            return

    def _check_follower(self) -> None:
        self._follower.look()
        if self._follower.seconds > _FOLLOWER_SECONDS and (pid := followers.follower(self._spec.folder)):
            told = f"the task, {pid}, was held up by a signal, and was ended"
            self.emit({"event": "warning", "message": told})
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _stop_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._stop_by = deadline if self._stop_by is None else min(self._stop_by, deadline)

    def _is_given_up(self) -> bool:
        """Whether nobody will come back to this run."""
        if self._starter is not None and not connection.wait([self._starter], 0):
            return False
        if self._spec.outlive_seconds == 0:
            return True
        try:
            followed = (self._folder / "followed").stat().st_mtime
        except FileNotFoundError:
            followed = (self._folder / "spec.json").stat().st_mtime
        # The file server may have another clock: how long the time of the file has stood is asked of our own.
        if self._followed is None or self._followed[0] != followed:
            self._followed = followed, time.monotonic()
        return time.monotonic() - self._followed[1] > self._spec.outlive_seconds


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is; None where there is none."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_dev, facts.st_ino


def main() -> None:
    """Supervise the run in the folder that the command line names, for the process that started this one.

    That also names an open file, into which this says which process the supervisor is.
    """
    folder, asker, answer, *private = Path(sys.argv[1]), *map(int, sys.argv[2:])
    starter = None
    with contextlib.suppress(ProcessLookupError):
        starter = os.pidfd_open(asker)
    # Who is no longer the parent has ended before it was looked for.
    starter = starter if os.getppid() == asker else None
    process_above.go_on_below()
    os.setsid()
    with contextlib.suppress(BrokenPipeError):
        os.write(answer, struct.pack("i", os.getpid()))
    os.close(answer)
    handed_over.keep(handed_over.read(private))
    Supervisor(folder, starter).run()


if __name__ == "__main__":
    main()
