"""Why a train task left no outcome, as far as its state in Airflow tells: people mark tasks by hand."""

from __future__ import annotations

_AGAIN = "clear it, and the job is trained"
_WORDS = {
    "success": "its train task is a success, but has told of no training, as where it is marked so by hand: "
    + _AGAIN,
    "failed": "its train task has failed before it could tell of any training, or was marked as failed by "
    f"hand; its log says more. To mend it, {_AGAIN}",
    "skipped": f"its train task was skipped, as where it is marked so by hand: {_AGAIN}",
    "upstream_failed": "its train task did not run, since a task before it has failed, or was marked as "
    "failed by hand: clear that with what is downstream of it",
}
_UNKNOWN = "its train task left no outcome; see its log"


def in_words(state: str | None) -> str:
    """The reason, and what helps."""
    return _WORDS.get(str(state), _UNKNOWN)
