"""Random numbers where matrices are cut: between two cut layers each rank has other features, or heads.

There each rank draws by itself; drawn alike, as everywhere else, one mask would drop features of all ranks
together, and twice the variance would come of two ranks. What ranks draw follows from the state that all
have alike where they enter, so that who computes a block again draws the same again, given the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.training import rng
from saturn_airflow.training.nested import tensors_in
from saturn_airflow.training.ranks import Ranks

# What draws one number for each of its input, which a rank has a part of.
_EACH = ("dropout", "alpha_dropout", "scaled_dot_product_attention", "rrelu", "rand_like", "randn_like")
_EACH_TOO = ("bernoulli", "uniform", "normal", "exponential", "native_dropout", "gumbel_softmax")
_DROPS = ("dropout", "alpha_dropout")
# Set on tensors of which a rank has a part, while they are followed.
_PART = "_saturn_part"
# Words of 32 bits that the generators of numpy and of Python take for one number, and make anew at once.
_WORDS_OF_ONE, _WORDS = 2, 624


class CutDraws:
    """Has each rank draw by itself between layers that are cut.

    :param opening: the modules that a rank gets a part of features from.
    :param closing: those that put parts together.
    """

    def __init__(self, ranks: Ranks, opening: Sequence[nn.Module], closing: Sequence[nn.Module]) -> None:
        self._ranks = ranks
        self._opening, self._closing = opening, closing
        self._common: list[torch.Tensor] | None = None
        self._own: list[torch.Tensor] = []
        self._on_host: list[tuple[Any, int]] = []
        self._follows = False
        #: Whether what is computed now is of experts, of which each rank has others.
        self.of_experts = False

    @property
    def is_between(self) -> bool:
        """Whether what is computed now lies between layers that are cut."""
        return self._common is not None

    def begin(self) -> None:
        """Begin a pass; one that was broken off may have left something."""
        self._common = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what is drawn in a pass in training: only where something is, ranks draw by themselves.

        :raises DoesNotFit: for what would be drawn otherwise than on one device.
        """
        hooks = [m.register_forward_hook(self._opened(number)) for number, m in enumerate(self._opening)]
        hooks += [m.register_forward_pre_hook(_not_compiled(self._closes)) for m in self._closing]
        put_together = [module.register_forward_hook(self._put_together) for module in self._closing]
        follower = _Follower(self)
        self.begin()
        self._follows = True
        try:
            with torch.compiler.set_stance("force_eager"), follower:
                yield
        finally:
            self._follows = False
            for hook in put_together:
                hook.remove()
        if not follower.draws:
            for hook in hooks:
                hook.remove()
        elif self.is_between:
            _refuse("where the layers that put the parts together do not follow in the same pass")
        self.begin()

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Draw by this rank alone inside, as often as may be, and go on as if nothing had been drawn."""
        before = self._states()
        self._seed(before, f"experts {name}")
        self.of_experts = True
        try:
            yield
        finally:
            self.of_experts = False
            self._set(before)

    def _opened(self, number: int) -> Callable[..., None]:
        def opened(module: nn.Module, args: Any, outputs: Any) -> None:
            if self._follows:
                _mark(outputs, True)
            if self._common is None:
                self._common = self._states()
                self._seed(self._common, f"layer {number}")
                self._own = self._states()
                if self._follows:
                    self._on_host = rng.states_on_host()

        return _not_compiled(opened)

    def _closes(self, module: nn.Module, args: Any) -> None:
        if self._common is None:
            return
        if self._follows and any(map(_draws_several, self._on_host, rng.states_on_host())):
            _refuse("by numpy or Python's random, between layers that are cut, alike on each device")
        drew = [bool((a != b).any()) for a, b in zip(self._own, self._states(), strict=True)]
        self._set(self._common)
        self._common = None
        for generator, one in zip(self._generators(), drew, strict=True):
            if one:  # else the next layers would draw the same
                torch.rand((), generator=generator, device=generator.device)

    def _put_together(self, module: nn.Module, args: Any, outputs: Any) -> None:
        _mark(outputs, False)

    def _generators(self) -> list[torch.Generator]:
        generators = [torch.default_generator]
        if self._ranks.device.type == "cuda":
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        return generators

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def _seed(self, common: Sequence[torch.Tensor], where: str) -> None:
        position = [state.numpy().tobytes().hex() for state in common]
        for generator in self._generators():
            generator.manual_seed(rng.number(*position, where, self._ranks.rank))


class _Follower(TorchFunctionMode):
    """Sees what draws random numbers, and follows the tensors of which a rank has a part.

    :ivar draws: whether something is drawn between layers that are cut.
    """

    def __init__(self, draws: CutDraws) -> None:
        super().__init__()
        self.draws = False
        self._cut = draws

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = (getattr(func, "__name__", None) or "").rstrip("_")
        if self._cut.of_experts:
            return func(*args, **(kwargs or {}))
        given = list(tensors_in((args, kwargs or {})))
        part = any(getattr(tensor, _PART, False) for tensor in given)
        between = self._cut.is_between
        before = self._cut._states()
        result = func(*args, **(kwargs or {}))
        if any(not torch.equal(a, b) for a, b in zip(before, self._cut._states(), strict=True)):
            self._look(func, name, part, between)
        generator = (kwargs or {}).get("generator")
        by_own = generator is not None and generator not in self._cut._generators()
        if between and by_own and any(t.shape[-1:] > (1,) for t in tensors_in(result)):
            _refuse(f"by {name} and a generator of the job's own, between layers that are cut, alike on each")
        if between and name in _DROPS:
            self.draws = True  # if not now, then when it is told to drop more
        if part and not name.startswith("new_"):
            _mark(args[0] if result is None and args else result, True)
        return result

    def _look(self, func: Any, name: str, part: bool, between: bool) -> None:
        self.draws = self.draws or between
        called = resolve_name(func) or name
        if between and not part:
            _refuse(f"by {called}, between layers that are cut, for something that is whole on each device")
        if part and not between:
            _refuse(f"by {called}, for a part that a device has, outside of layers that are cut")
        if part and name not in (*_EACH, *_EACH_TOO):
            _refuse(f"by {called}, between layers that are cut, not for each number by itself")


def _draws_several(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether more than one number was drawn; one that decides for all features is alike on all ranks."""
    anew = 0 if before[0] == now[0] else _WORDS
    return now[1] + anew - before[1] > _WORDS_OF_ONE


def _not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    eager: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return eager


def _refuse(how: str) -> NoReturn:
    raise DoesNotFit(
        f"random numbers are drawn {how}: they would be others than on one device; use another technique"
    )


def _mark(outputs: Any, part: bool) -> None:
    for tensor in tensors_in(outputs):
        setattr(tensor, _PART, part)
