"""Fairness, rounds to a target, forgetting: against hand-worked values."""

import math

import numpy as np
import pytest

from experiments.metrics import fairness, forgetting, rounds_to_target


def test_fairness_of_twenty_clients_by_hand():
    mean, std, worst10, best10 = fairness([i / 20 for i in reversed(range(20))])
    assert mean == pytest.approx(9.5 / 20)
    assert std == pytest.approx(math.sqrt((20**2 - 1) / 12) / 20)  # population std of 0..n-1
    assert worst10 == pytest.approx((0 + 1) / 2 / 20)
    assert best10 == pytest.approx((19 + 18) / 2 / 20)


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (70, 7), (71, 8), (1000, 100)])
def test_a_tenth_is_rounded_up_to_whole_clients(clients, tenth):
    values = np.arange(clients, dtype=float)
    result = fairness(values)
    assert result.worst10 == pytest.approx((tenth - 1) / 2)
    assert result.best10 == pytest.approx(clients - 1 - (tenth - 1) / 2)


def test_fairness_leaves_out_clients_without_test_data():
    assert fairness([0.2, math.nan, 0.4]) == fairness([0.4, 0.2])


@pytest.mark.parametrize("values", [[], [math.nan, math.nan]])
def test_fairness_of_nobody_is_an_error(values):
    with pytest.raises(ValueError, match="at least one client"):
        fairness(values)


def test_fairness_ignores_the_order_of_clients():
    values = np.random.default_rng(0).random(37)
    assert fairness(values) == fairness(values[::-1])


def test_rounds_to_target():
    assert rounds_to_target([0, 5, 10, 15], [0.1, 0.5, 0.4, 0.5], 0.5) == 5
    assert rounds_to_target([0, 5], [0.1, math.nan], 0.5) is None
    assert rounds_to_target([], [], 0.5) is None


def test_forgetting_by_hand():
    assert forgetting([0.25, 0.75, 0.5], higher_is_better=True) == (0.25, -0.25, 0.0)


def test_forgetting_flips_the_sign_of_a_loss():
    accuracy = [0.1, 0.7, 0.4, 0.6]
    loss = [1 - value for value in accuracy]
    assert forgetting(loss, higher_is_better=False) == pytest.approx(forgetting(accuracy, higher_is_better=True))


def test_steady_progress_forgets_nothing():
    result = forgetting([0.1, 0.2, 0.3], higher_is_better=True)
    assert result.forgetting == 0
    assert result.zeta == result.updatable == pytest.approx(-0.3)


@pytest.mark.parametrize("series", [[], [0.1, math.nan]])
def test_forgetting_needs_finite_values(series):
    with pytest.raises(ValueError, match="finite"):
        forgetting(series, higher_is_better=True)
