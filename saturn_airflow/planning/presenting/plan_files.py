"""Plans from files."""

from __future__ import annotations

from pathlib import Path

from saturn_airflow.model import json_text
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Plan


def read_plan(path: str | Path) -> Plan:
    """The plan in a JSON file.

    :raises InvalidSweepError: when the file can't be read or holds no plan.
    """
    try:
        return Plan.from_dict(json_text.parse(Path(path).read_text()))
    except OSError as error:
        raise InvalidSweepError(f"{path} can't be read: {error.strerror}") from None
    except KeyError as error:
        raise InvalidSweepError(
            f"{path} is no whole plan: it lacks {error}; give what 'saturn plan --json' printed"
        ) from None
    except ValueError as error:
        raise InvalidSweepError(
            f"{path} is damaged: it is no JSON ({error}); make it anew with 'saturn plan --json'"
        ) from None
    except (TypeError, AttributeError):
        raise InvalidSweepError(
            f"{path} is JSON, and no plan; give what 'saturn plan --json' printed"
        ) from None
