"""Calling a technique: Saturn's own in the supervisor itself, others in a process of their own.

A technique's ``search`` and ``execute`` may do anything. Of those that come with Saturn it is known that they
launch ranks and do nothing else; so where the supervisor has imported what they need, as those have that are
forked from a node's server, a process is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from saturn_airflow.launch import failures, forked, launching
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.launching import Event
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model import references

_DRIVE, _EXPORT = "saturn_airflow.training.driving:drive", "saturn_airflow.training.driving:export"
_IS_SATURNS = "saturn_airflow.library:is_saturns"

LaunchRanks = Callable[[Any, Callable[[], bool]], Any]


def call(
    spec: RunSpec,
    device_ids: list[int],
    deadline: float,
    *,
    on_event: Callable[[Event], None],
    launch_ranks: LaunchRanks,
    poll: Callable[[], bool],
    keep_open: Sequence[int],
) -> dict[str, Any]:
    """What the run's technique makes of it.

    :param deadline: of a trial (``time.monotonic``).
    :param launch_ranks: launches ranks as a technique asks for them; its second argument says whether the
        technique still lives.
    :param on_event: as for :func:`saturn_airflow.launch.launching.launch`, as are the others.
    :raises RanksFailedError: when it failed.
    """
    data = spec.to_dict()
    if not (forked.may_fork and references.resolve(_IS_SATURNS)(spec.technique)):
        arguments = (data, device_ids, deadline)
        (result,) = launching.launch(
            _DRIVE, [arguments], on_event=on_event, on_request=launch_ranks, poll=poll, keep_open=keep_open
        )
        return dict(result)

    def export(checkpoint: str) -> dict[str, Any]:
        # It may call the job's load_model.
        with _not_through_the_technique():
            (exported,) = launching.launch(
                _EXPORT, [(data, checkpoint)], on_event=on_event, poll=poll, keep_open=keep_open
            )
        return dict(exported)

    try:
        link = _InProcessLink(on_event, launch_ranks, poll)
        return dict(references.resolve(_DRIVE)(link, data, device_ids, deadline, export))
    except _EndedError as ended:
        raise ended.why from None
    except Exception as error:
        raise RanksFailedError(failures.describe(error)) from None


class _InProcessLink:
    """What a technique that is called in the supervisor has for a
    :class:`~saturn_airflow.launch.launching.Link`."""

    def __init__(
        self, on_event: Callable[[Event], None], launch_ranks: LaunchRanks, poll: Callable[[], bool]
    ) -> None:
        self.emit = on_event
        self._launch_ranks = launch_ranks
        self._poll = poll

    def request(self, what: Any) -> Any:
        """Launch ranks."""
        with _not_through_the_technique():
            answer = self._launch_ranks(what, lambda: True)
            self._poll()
        return answer

    def stop_requested(self) -> bool:
        """Whether the run is to stop."""
        with _not_through_the_technique():
            return self._poll()


class _EndedError(BaseException):
    """The run ends, whatever the technique would make of it."""

    def __init__(self, why: Exception) -> None:
        super().__init__()
        self.why = why


@contextlib.contextmanager
def _not_through_the_technique() -> Iterator[None]:
    """Errors of the run itself end it: a technique that catches exceptions does not get to see them."""
    try:
        yield
    except Exception as error:
        raise _EndedError(error) from None
