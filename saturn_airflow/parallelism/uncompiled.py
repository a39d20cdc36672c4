"""Looking at each operation, inside of what torch compiles too."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from typing_extensions import Self


class UncompiledDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode inside of which nothing is compiled, nor what is compiled already used.

    What ``torch.compile`` first meets inside of any other it never compiles, and raises at each later call
    where it was given ``fullgraph=True``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stances: list[AbstractContextManager[Any]] = []  # one for each time that it is entered

    def __enter__(self) -> Self:
        """Begin to look."""
        stance: AbstractContextManager[Any] = nullcontext()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
            stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        self._stances.append(stance)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """End it, and compile as before."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*raised)
