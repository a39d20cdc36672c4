"""What training switches of a model: whether modules train, and which parameters ask for gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

#: What a checkpoint has beside a module's attributes, by this name.
SWITCHED = "switched by training"

_TRAINS, _ASKS = "trains", "asks for gradients"


class Switches:
    """How a model's modules and parameters are switched, beside how they were as training began.

    :param model: as this rank trains it, before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._asked = {prefix: _asking(module) for prefix, module in model.named_modules()}
        self._trained: dict[str, bool] = {}
        self._to_switch: dict[str, Any] = {}

    def begin(self) -> None:
        """Take the modules' modes as those that training begins with, but for what :meth:`set` was told."""
        self._trained = {prefix: module.training for prefix, module in self._model.named_modules()}
        switch(self._model, self._to_switch)
        self._to_switch = {}

    def set(self, switched: Mapping[str, Any]) -> None:
        """Continue with what :meth:`values` told."""
        switch(self._model, switched)
        self._to_switch = dict(switched)

    def values(self) -> dict[str, Any]:
        """What is not as it was, by the module's name."""
        found: dict[str, Any] = {}
        for prefix, module in self._model.named_modules():
            own: dict[str, Any] = {}
            if self._trained.get(prefix, module.training) != module.training:
                own[_TRAINS] = module.training
            asked = self._asked.get(prefix, {})
            asking = {key: asks for key, asks in _asking(module).items() if asked.get(key, asks) != asks}
            if asking:
                own[_ASKS] = asking
            if own:
                found[prefix] = own
        return found


def switch(model: nn.Module, switched: Mapping[str, Any]) -> None:
    """Switch modules and parameters of ``model`` as :meth:`Switches.values` told."""
    modules = dict(model.named_modules())
    for prefix, own in switched.items():
        if (module := modules.get(prefix)) is None:
            continue
        module.training = own.get(_TRAINS, module.training)
        for key, asks in own.get(_ASKS, {}).items():
            if (parameter := module._parameters.get(key)) is not None:
                parameter.requires_grad_(asks)


def _asking(module: nn.Module) -> dict[str, bool]:
    return {key: p.requires_grad for key, p in module._parameters.items() if p is not None}
