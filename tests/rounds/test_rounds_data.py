"""What users give as ``rounds=`` and ``selection=``: what is taken or refused, and what rules decide."""

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow.model import selection
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import Chosen, MedianStopping, SuccessiveHalving, select


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "at least 1"),
        (-2, "at least 1"),
        (1000, "at most"),
        (True, "rounds is True"),
        (2.5, "rounds is 2.5"),
        ("four", "rounds is 'four'"),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused(value: Any, words: Any) -> None:
    with pytest.raises(InvalidSweepError, match=words):
        Rounds.of(value)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"most": 0}, "at least 1"),
        ({"every_minutes": 1 / 60}, "takes most of a minute"),
        ({"every_minutes": timedelta(seconds=59)}, "takes most of a minute"),
        ({"every_minutes": math.nan}, "give a number"),
        ({"share": 0.0}, "0.05 to 0.95"),
        ({"share": 1.0}, "0.05 to 0.95"),
        ({"off_by": 0.0001}, "every round would end at once"),
        ({"share": 0.5, "off_by": 0.1}, "not both"),
    ],
)
def test_a_policy_that_would_fire_all_the_time_is_refused(policy: Any, words: Any) -> None:
    with pytest.raises(InvalidSweepError, match=words):
        Rounds(**policy)


def test_a_round_ends_when_its_policy_says() -> None:
    assert Rounds(every_minutes=2).length(1000) == 120
    assert Rounds(every_minutes=timedelta(seconds=90)) == Rounds(every_minutes=1.5)
    assert Rounds(share=0.25).length(1000) == 250
    straying = Rounds(off_by=0.1)
    assert straying.length(1000) == math.inf
    assert straying.strayed(601, 500, 1000)
    assert not straying.strayed(599, 500, 1000)
    assert not Rounds.of(4).strayed(900, 500, 1000)


def curve(*values: Any) -> Any:
    return {float(epoch): value for epoch, value in enumerate(values, 1)}


def test_halving_keeps_the_best_of_those_that_reached_a_rung() -> None:
    histories = {
        "good": curve(0.5, 0.4, 0.3),
        "fair": curve(0.6, 0.5),
        "poor": curve(0.7),
        "bad": curve(0.9),
        "new": {},
    }
    assert SuccessiveHalving().pruned(histories) == ["bad", "fair", "poor"]
    assert SuccessiveHalving(mode="max").pruned(histories) == ["fair", "good"]
    assert SuccessiveHalving(min_epochs=2).pruned(histories) == ["fair"]


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.lists(st.floats(0, 10), max_size=9), max_size=9),
    st.integers(2, 4),
    st.integers(1, 3),
)
def test_halving_never_drops_all_and_never_the_untried(values: Any, reduction: Any, min_epochs: Any) -> None:
    histories = {job: curve(*own) for job, own in values.items()}
    dropped = SuccessiveHalving(reduction=reduction, min_epochs=min_epochs).pruned(histories)
    tried = [job for job, history in histories.items() if len(history) >= min_epochs]
    assert set(dropped) <= set(tried)
    if tried:
        assert len(dropped) < len(tried)


@given(st.integers(2, 5), st.integers(1, 4), st.floats(0, 100))
def test_the_next_rung_is_a_rung_above(reduction: Any, least: Any, epochs: Any) -> None:
    rung = SuccessiveHalving(reduction=reduction, min_epochs=least).next_rung(epochs)
    assert rung > epochs
    assert rung == least or rung / reduction <= epochs


def test_median_stopping_drops_those_below_the_median_of_enough_others() -> None:
    histories = {name: curve(value, value) for name, value in zip("abcd", (0.1, 0.2, 0.3, 0.9), strict=True)}
    assert MedianStopping().pruned(histories) == ["c", "d"]
    assert MedianStopping(min_jobs=4).pruned(histories) == []
    assert "a" in MedianStopping(mode="max").pruned(histories)


def drop_none(histories: Any) -> Any:
    return []


def drop_worst(histories: Any) -> Any:
    return [max(histories, key=lambda job: min(histories[job].values()))]


def drop_all(histories: Any) -> Any:
    return list(histories)


def raises(histories: Any) -> None:
    raise RuntimeError("a bug of mine")


def returns_a_number(histories: Any) -> Any:
    return 3


TWO = {"a": curve(0.1), "b": curve(0.2)}


def test_a_function_of_the_user_chooses() -> None:
    assert select(Chosen(drop_worst), TWO, ["a", "b"], "eval_loss").pruned == ("b",)
    assert select(selection.rule_of(drop_none), TWO, ["a", "b"], "eval_loss").pruned == ()


@pytest.mark.parametrize(
    ("function", "words"),
    [(raises, "RuntimeError: a bug of mine"), (returns_a_number, "returned 3"), (drop_all, "every job")],
)
def test_a_selection_that_is_wrong_drops_none_and_is_told_of(function: Any, words: Any) -> None:
    found = select(Chosen(function), TWO, ["a", "b"], "eval_loss")
    assert found.pruned == ()
    assert words in found.warnings[0]


def test_a_metric_nobody_reported_is_told_of() -> None:
    found = select(SuccessiveHalving(), {"a": {}, "b": {}}, ["a", "b"], "eval_loss")
    assert found.pruned == ()
    assert "eval_loss" in found.warnings[0]


def test_a_finished_job_is_not_dropped() -> None:
    assert select(Chosen(drop_all), TWO, ["b"], "eval_loss").pruned == ("b",)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda: SuccessiveHalving(metric="accuracy"), "is 'accuracy' better small or large"),
        (lambda: MedianStopping(metric="accuracy"), "is 'accuracy' better small or large"),
        (lambda: SuccessiveHalving(metric="loss"), "not measured at the end of each epoch"),
        (lambda: SuccessiveHalving(reduction=1), "reduction is 1"),
        (lambda: SuccessiveHalving(min_epochs=0), "min_epochs is 0"),
        (lambda: SuccessiveHalving(mode="least"), "mode is 'least'"),  # type: ignore[arg-type]
        (lambda: MedianStopping(min_jobs=0), "min_jobs is 0"),
        (lambda: Chosen(lambda histories: []), "lambda"),
        (lambda: selection.rule_of(3), "selection is 3"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rule: Any, words: Any) -> None:
    with pytest.raises(InvalidSweepError, match=words):
        rule()
