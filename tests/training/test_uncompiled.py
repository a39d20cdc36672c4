"""Looking at operations does not keep torch from compiling what was looked at."""

from __future__ import annotations

from typing import Any

import torch

from saturn_airflow.parallelism.uncompiled import UncompiledDispatchMode


class Hears(UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_what_is_first_met_inside_is_heard_and_compiled_afterwards() -> None:
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append("once")
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x, hears = torch.ones(3), Hears()
    with hears:
        twice(x)
        with hears:  # the same one, as where one look is within another
            twice(x)
        twice(x)
    assert hears.heard.count("mul.Tensor") >= 3
    assert not compiled
    twice(x)
    assert compiled == ["once"]
    with hears:
        del hears.heard[:]
        twice(x)
    assert hears.heard == ["mul.Tensor"]
    twice(x)
    assert compiled == ["once"]
