"""What several ranks keep of the same modules and variables: that counts which one has changed itself.

A stage of a pipeline has all modules, and trains some; the others are as a checkpoint has left them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: By a module's name, values by the attribute's or variable's.
Values = dict[str, dict[str, Any]]

_AS_IT_WAS = " (as it was)"


def noted(values: Values, before: Mapping[str, Mapping[str, Any]]) -> Values:
    """``values`` with a note of those that are as they were."""
    return {
        module: {
            key + _AS_IT_WAS if key in (was := before.get(module, {})) and was[key] == value else key: value
            for key, value in own.items()
        }
        for module, own in values.items()
    }


def merged(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> Values:
    """Of each value what the first rank has that has changed it, or the first; without the notes."""
    found: Values = {}
    for part in parts:
        for module, own in part.items():
            found[module] = {**own, **found.get(module, {})}
    return {
        module: {
            key.removesuffix(_AS_IT_WAS): value
            for key, value in sorted(own.items(), key=lambda item: not item[0].endswith(_AS_IT_WAS))
        }
        for module, own in found.items()
    }
