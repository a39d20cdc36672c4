"""Switching off what a model draws at random, so that two ways of computing it can be compared.

Dropout drops nothing: it makes its input larger, the more the more it would drop, so that it shows where it
is left out, or drops in an evaluation. Random tensors become constants that do not depend on who draws them,
in which order, and for how many samples; so they do where functions of torch were imported by name, as in
``from torch import rand``. What Python's and numpy's generators are asked for is drawn from a generator that
starts anew each time; by functions that were imported by name, anew in each forward pass.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from saturn_airflow.training import rng


def _drawn_by(module: ModuleType, generator: Any) -> list[str]:
    """The names of a module's functions that draw by its global generator."""
    of_state = ("seed", "getstate", "setstate", "get_state", "set_state")
    names = [name for name in dir(module) if not name.startswith("_") and name not in of_state]
    return [name for name in names if getattr(getattr(module, name), "__self__", None) is generator]


_PYTHON = _drawn_by(random, random.random.__self__)  # type: ignore[attr-defined]
_NUMPY = [*_drawn_by(np.random, np.random.rand.__self__), "ranf", "sample"]  # type: ignore[attr-defined]
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
#: Those that can draw by a generator that they are given.
_BY_GENERATOR = (
    *("rand", "randn", "randint", "randperm", "multinomial", "normal", "bernoulli"),
    *("bernoulli_", "uniform_", "normal_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_"),
    *("rrelu", "rrelu_", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)
_DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
# By how much a dropout makes its input larger, for each unit of its probability: by so little that numbers do
# not grow much through many layers, and by more than the comparison takes for rounding.
_SHOWN = 0.125


class SwitchedOffRandomness:
    """What was switched off.

    :ivar drew: whether something would have been drawn.
    :ivar generators: those of the job's own that would have been drawn by, by their ids.
    """

    def __init__(self) -> None:
        self.drew = False
        self.generators: dict[int, torch.Generator] = {}

    def noting(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """``draw``, that notes which generator it is given."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            generator = kwargs.get("generator")
            if generator is not None and generator is not torch.default_generator:
                self.generators[id(generator)] = generator
            return draw(*args, **kwargs)

        return noted

    def _shown(self, p: float, train: bool = True) -> float:
        """What a dropout multiplies its input by."""
        drops = bool(train and p > 0)
        self.drew = self.drew or drops
        return 1 + _SHOWN * p if drops else 1.0

    def _dropout(self, inputs: torch.Tensor, p: float = 0.5, train: bool = True, *args: Any) -> torch.Tensor:
        factor = self._shown(p, train)
        return inputs if factor == 1 else inputs * factor

    def _dropout_in_place(
        self, inputs: torch.Tensor, p: float = 0.5, train: bool = True, *args: Any
    ) -> torch.Tensor:
        factor = self._shown(p, train)
        return inputs if factor == 1 else inputs.mul_(factor)

    def _rectified(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The least slope in the place of one that is drawn for each number; in evaluation it is another."""

        def rectified(
            inputs: torch.Tensor,
            lower: float = 1 / 8,
            upper: float = 1 / 3,
            training: bool = False,
            generator: Any = None,
        ) -> Any:
            self.drew = self.drew or training
            return own(inputs, lower, lower if training else upper, False)

        return rectified

    def _attention(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            *args: Any,
            **kw: Any,
        ) -> Any:
            attended = own(query, key, value, attn_mask, 0.0, *args, **kw)
            factor = self._shown(dropout_p)
            return attended if factor == 1 else attended * factor

        return attention

    def _recurrent(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """An RNN over layers takes (..., layers, dropout, train, bidirectional, [batch first])."""

        def recurrent(*args: Any) -> Any:
            # A padded batch ends with train and two more, a packed one with train and one more.
            place = next(i for i, a in enumerate(args) if isinstance(a, float))
            outputs, *states = own(*args[:place], 0.0, *args[place + 1 :])
            factor = self._shown(args[place], args[place + 1])
            return (outputs if factor == 1 else outputs * factor, *states)

        return recurrent

    def _constant(self, value: float) -> Callable[..., torch.Tensor]:
        def constant(
            *args: Any, generator: Any = None, requires_grad: bool = False, **kwargs: Any
        ) -> torch.Tensor:
            self.drew = True
            # empty() takes sizes in each of the forms that rand() does, full() in one.
            return torch.empty(*args, **kwargs).fill_(value).requires_grad_(requires_grad)

        return constant

    def _constant_like(self, value: float) -> Callable[..., torch.Tensor]:
        def constant(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.drew = True
            kwargs = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
            return torch.full_like(like.detach(), value, **kwargs)

        return constant

    def _filled(self, value: Callable[..., float]) -> Callable[..., torch.Tensor]:
        def filled(tensor: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
            self.drew = True
            return tensor.fill_(value(*args, **kwargs))

        return filled

    def _mean(self, mean: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The mean of a distribution in the place of what is drawn from it."""

        def middle(*parameters: Any, generator: Any = None) -> torch.Tensor:
            self.drew = True
            return mean(*parameters)

        return middle

    def _normal(self, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.drew = True
        if args or "size" in kwargs:
            size = args[0] if args else kwargs["size"]
            options = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
            return torch.full(size, mean + std / 2, **options)
        return torch.as_tensor(mean + std / 2)

    def _randint(self, low: int = 0, high: Any = None, size: Any = None, **kwargs: Any) -> torch.Tensor:
        """The middle of the range: ``randint([low, ]high, size)``."""
        self.drew = True
        if isinstance(high, list | tuple):
            high, size = None, high
        low, high = (0, low) if high is None else (low, high)
        kwargs = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
        return torch.full(tuple(size), (low + high) // 2, **{"dtype": torch.long, **kwargs})

    def _randint_like(
        self, like: torch.Tensor, low: int, high: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        low, high = (0, low) if high is None else (low, high)
        return self._constant_like((low + high) // 2)(like, **kwargs)

    def _permutation(self, n: int, *, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        """The other way round, so that what mixes the samples of a batch is seen to do so."""
        self.drew = True
        kwargs = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
        return torch.arange(n - 1, -1, -1, **kwargs)

    def _multinomial(
        self, weights: torch.Tensor, num_samples: int, replacement: bool = False, **_: Any
    ) -> torch.Tensor:
        """The most probable; where nothing is drawn twice, the most probable ones."""
        self.drew = True
        if replacement:
            return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], num_samples).clone()
        return weights.sort(dim=-1, descending=True, stable=True).indices[..., :num_samples]

    def _from_the_start(self, own: Callable[..., Any], seed: Callable[[int], object]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            self.drew = True
            seed(0)
            return own(*args, **kwargs)

        return draw

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """What stands where while nothing is random: (where, name, what)."""
        functional, low, tensor = torch.nn.functional, torch._VF, torch.Tensor
        for name in _DROPOUTS:
            # Python's own functions of torch end in these two, wherever they were imported from.
            yield low, name, self._dropout
            yield low, f"{name}_", self._dropout_in_place
        yield torch, "dropout", self._dropout
        for name in _RECURRENT:
            yield low, name, self._recurrent(getattr(low, name))
        name = "scaled_dot_product_attention"
        yield functional, name, self._attention(getattr(functional, name))
        yield torch, "rand", self._constant(0.5)
        yield torch, "randn", self._constant(0.5)
        for name, value in (("rand_like", 0.5), ("randn_like", 0.5), ("bernoulli", 1.0)):
            yield torch, name, self._constant_like(value)
        yield torch, "randint", self._randint
        yield torch, "randint_like", self._randint_like
        yield torch, "randperm", self._permutation
        yield torch, "multinomial", self._multinomial
        yield tensor, "multinomial", lambda *args, **kwargs: self._multinomial(*args, **kwargs)
        yield torch, "normal", self._normal
        yield tensor, "bernoulli", self._constant_like(1.0)
        yield tensor, "bernoulli_", self._filled(lambda p=0.5: 1.0)
        yield (
            tensor,
            "uniform_",
            self._filled(
                lambda a=0.0, b=1.0: (a + b) / 2,
            ),
        )
        yield tensor, "normal_", self._filled(lambda mean=0.0, std=1.0: mean + std / 2)
        yield tensor, "exponential_", self._filled(lambda lambd=1.0: 1 / lambd)
        yield tensor, "cauchy_", self._filled(lambda median=0.0, sigma=1.0: median + sigma / 2)
        yield tensor, "log_normal_", self._filled(lambda mean=1.0, std=2.0: math.exp(mean))
        yield tensor, "geometric_", self._filled(lambda p: 1 / p)
        for name in ("rrelu", "rrelu_"):
            yield torch, name, self._rectified(getattr(torch, name))
        # What torch.distributions draws by.
        yield torch, "poisson", self._mean(torch.round)
        yield torch, "binomial", self._mean(lambda count, p: torch.round(count * p))
        yield torch, "_standard_gamma", self._mean(torch.clone)
        yield torch, "_sample_dirichlet", self._mean(lambda share: share / share.sum(-1, keepdim=True))
        for name in _PYTHON:
            yield random, name, self._from_the_start(getattr(random, name), random.seed)
        for name in _NUMPY:
            yield np.random, name, self._from_the_start(getattr(np.random, name), np.random.seed)


class _ByName(TorchFunctionMode):
    """Has stand-ins called for what they stand in for, by whatever name that is called.

    :param stand_ins: by the functions of torch.
    """

    def __init__(self, stand_ins: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._stand_ins.get(func, func)(*args, **(kwargs or {}))


#: What is switched off now; the last one counts.
_switched_off: list[SwitchedOffRandomness] = []


@contextmanager
def each_pass_anew() -> Iterator[None]:
    """Around a forward pass: while nothing is random, Python's and numpy's own generators begin it alike."""
    if not _switched_off:
        yield
        return
    random.seed(0)
    np.random.seed(0)
    before = rng.states_on_host()
    yield
    if rng.states_on_host() != before:
        _switched_off[-1].drew = True


@contextmanager
def without_randomness(*, own_generators: bool = True) -> Iterator[SwitchedOffRandomness]:
    """While it lasts, nothing that this process computes is random; for all its threads, but for what others
    than this one draw by functions of torch that were imported by name.

    :param own_generators: nor what is drawn by a ``generator=`` of the job's own. Where this is not so, who
        draws is to begin with those in the same state: then they show whether the same is drawn.
    """
    what = SwitchedOffRandomness()
    by_name: dict[Any, Callable[..., Any]] = {}
    with ExitStack() as patched:
        patched.callback(random.setstate, random.getstate())
        patched.callback(np.random.set_state, np.random.get_state())
        for where, name, stand_in in list(what.patches()):
            own = getattr(where, name)
            if name in vars(where):
                patched.callback(setattr, where, name, own)
            else:  # it is inherited, or made when it is asked for
                patched.callback(delattr, where, name)
            draw = stand_in if own_generators else _unless_by_own(stand_in, own)
            if name in _BY_GENERATOR and where is not random:
                draw = what.noting(draw)
            setattr(where, name, draw)
            if where in (torch, torch.nn.functional):
                by_name[own] = draw
        patched.enter_context(_ByName(by_name))
        _switched_off.append(what)
        patched.callback(_switched_off.pop)
        yield what


def _unless_by_own(stand_in: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        by_default = kwargs.get("generator") in (None, torch.default_generator)
        return (stand_in if by_default else own)(*args, **kwargs)

    return draw
