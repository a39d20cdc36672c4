"""What `saturn doctor` says of nodes, from what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from saturn_airflow.cluster import Cluster, Node
from saturn_airflow.deployment import survey
from saturn_airflow.deployment.checks import Deployment, Finding, check_nodes, examine_node

NODE = Node("gpu-a", 2, kind="cpu")


def said(**versions: str) -> dict[str, Any]:
    """What a whole node says, in these versions."""
    return {"versions": versions, "reach": {"MLflow": None}, "gpus": [], "devices": []}


def nodes(**versions: str) -> list[Finding]:
    deployment = Deployment(Cluster(NODE), nodes={NODE.name: said(**versions)})
    return list(check_nodes(deployment))


def test_a_whole_node_is_one_line() -> None:
    (found,) = nodes(**survey.versions())
    assert (found.level, found.text) == ("ok", "gpu-a: 2 x cpu (CPU slots)")


@pytest.mark.parametrize("here", [True, False])
def test_a_node_without_torch_is_one_problem(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: version for name, version in survey.versions().items() if name != "torch"}
    if not here:
        monkeypatch.setattr(survey, "PACKAGES", tuple(name for name in survey.PACKAGES if name != "torch"))
    (found,) = nodes(**there)
    assert (found.level, found.text) == ("problem", "gpu-a: torch is not installed")


def test_other_versions_are_a_warning() -> None:
    (found,) = nodes(**{**survey.versions(), "torch": "2.0"})
    assert found.level == "warning"
    assert found.text.startswith("gpu-a: runs torch 2.0 (here ")


def test_a_name_that_is_no_nodes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__NODES", "gpu-a:2:cpu, gpu-b:2:cpu")
    (found,) = examine_node("gpu-x")
    assert found.level == "problem"
    assert found.text == "'gpu-x' is no node of this deployment, which has gpu-a, gpu-b"
