"""Nodes and clusters: what is refused, with which message."""

from __future__ import annotations

from typing import Any

import pytest

from saturn_airflow import Cluster, InvalidSweepError, Node


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(), "the cluster has no nodes"),
        (lambda: Cluster("gpu-a"), "write Cluster(Node("),  # type: ignore[arg-type]
        (lambda: Cluster(Node("a", 1), Node("a", 2)), "two nodes are named 'a'"),
        (lambda: Cluster(Node("a", 1), Node("b", 2, queue="saturn.a")), "listen on the queue 'saturn.a'"),
        (lambda: Node("a", 0), "node 'a': devices is 0"),
        (lambda: Node("a", "8"), "node 'a': devices is '8'"),  # type: ignore[arg-type]
        (lambda: Node("gpu a", 1), "node 'gpu a': a node's name has"),
        (lambda: Node("a\n", 1), "a node's name has"),
        (lambda: Node("a", 1, kind=""), "kind is ''"),
        (lambda: Node("a", 1, kind="a100\x1b[2J"), "kind is 'a100"),
        (lambda: Node("a", 1, queue="slow\n"), "queue is 'slow"),
        (lambda: Cluster(Node("a", 1))["b"], "no node 'b'; it has a"),
    ],
)
def test_a_mistake_is_named(make: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError) as caught:
        make()
    assert message in str(caught.value)


def test_a_cluster_survives_a_round_trip() -> None:
    cluster = Cluster(Node("gpu-a", 8), Node("local", 2, kind="cpu", queue="slow"))
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert cluster["gpu-a"].queue == "saturn.gpu-a"
    assert cluster.devices == 10
