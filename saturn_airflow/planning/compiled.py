"""Machine code for the innermost loops, made from their Python by numba.

A search tries millions of schedules, and most of its time goes into a few small loops over numbers.
Compiled they run many times faster. What is compiled is kept on disk, next to the code or in the
user's cache, so that it is compiled once per machine, not once per solve.

The longest of these functions are long on purpose. A part that is called for each branch or move has the
references of all arrays it is given counted by the call: with the branch and bound and the pool's moves cut
into six and three functions, the same plans took 1.2 to 1.9 times the processor's time; the branch and bound
with numba putting the parts in their places (``inline="always"``) 1.1 to 2.9 times, for the same branches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

# Else numba paints its messages with colorama, which replaces sys.stdout while it compiles: under the feet of
# another thread, in which Pyomo captures what HiGHS prints.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

import numba

F = TypeVar("F", bound=Callable[..., Any])

_compiled_anew: list[str] = []


def compiled(function: F) -> F:
    """``function``, compiled when it is first called. While it runs, other threads of Python do too."""
    try:
        dispatcher: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        # Neither the code's folder nor the user's can be written to: compiled code can't be kept.
        _compiled_anew.append(function.__qualname__)
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
    _compile_again_where_unreadable(dispatcher._cache)
    return cast(F, dispatcher)


def is_kept() -> bool:
    """Whether what is compiled here is found on disk by the next process."""
    return not _compiled_anew


def _compile_again_where_unreadable(cache: Any) -> None:
    """Let numba forget what it kept and can't read: a torn file, or classes that a newer version renamed."""
    load = cache.load_overload

    def load_or_forget(*args: Any) -> Any:
        try:
            return load(*args)
        except Exception:
            cache.flush()
            return None

    cache.load_overload = load_or_forget
