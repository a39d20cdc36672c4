"""What a checkpoint's manifest holds of a training besides its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from saturn_airflow.model import formats
from saturn_airflow.training import job_globals, model_attributes, of_all_ranks
from saturn_airflow.training.optim import group_state, plain_values
from saturn_airflow.training.state import State


class StateBesideTensors(NamedTuple):
    """What a rank knows.

    :param forgotten: why what has changed besides can't be kept, by its name.
    :param late_buffers: the shapes of those that a model that is loaded anew lacks.
    """

    numbers: dict[str, dict[str, Any]]
    groups: group_state.Values
    common: dict[str, Any]
    own: dict[str, Any]
    attributes: model_attributes.Attributes
    variables: job_globals.Globals
    forgotten: dict[str, str]
    dtypes: dict[str, str]
    late_buffers: dict[str, list[int]]

    @classmethod
    def of(cls, state: State) -> StateBesideTensors:
        """What this rank knows of the training that ``state`` is of."""
        attributes, forgotten = state.attributes.values()
        variables: job_globals.Globals = {}
        if state.globals is not None:
            variables, others = state.globals.values()
            variables = state.globals.noted(variables)
            forgotten |= others
        return cls(
            state.optimizer_numbers(),
            state.groups.values(),
            state.common_numbers(),
            state.own.values(),
            state.attributes.noted(attributes),
            variables,
            forgotten,
            state.dtypes(),
            state.late_buffers(),
        )


def of_all(abouts: Sequence[StateBesideTensors]) -> dict[str, Any]:
    """What stands in the manifest, from what all ranks know."""
    attributes = of_all_ranks.merged(about.attributes for about in abouts)
    variables = of_all_ranks.merged(about.variables for about in abouts)
    late = {name: shape for about in abouts for name, shape in about.late_buffers.items()}
    values = [value for own in attributes.values() for value in own.values()]
    simple = not variables and not late and all(map(plain_values.is_of_the_first_format, values))
    return {
        # Versions that read format 1 alone can go on from all the others.
        formats.FORMAT: 1 if simple else 2,
        **({"job_globals": variables} if variables else {}),
        **({"late_buffers": late} if late else {}),
        "optimizer_numbers": {n: value for about in abouts for n, value in about.numbers.items()},
        "optimizer_groups": group_state.merged([about.groups for about in abouts]),
        "optimizer_common": abouts[0].common,
        "optimizer_attributes": abouts[0].own,
        "model_attributes": attributes,
        "forgotten": {name: why for about in abouts for name, why in about.forgotten.items()},
        "dtypes": {name: dtype for about in abouts for name, dtype in about.dtypes.items()},
    }
