"""Fairness, rounds to a target, forgetting, stability: against hand-worked values."""

import math

import numpy as np
import pytest

from experiments.metrics import (
    fairness,
    forgetting,
    rounds_to_target,
    share_fell,
    straightness,
    total_variation,
    udp,
    udp_norm,
)


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


def test_total_variation_and_falls_by_hand():
    series = [0.5, 0.75, 0.25, 0.25, 0.5]  # up 1/4, down 1/2, level, up 1/4
    assert total_variation(series) == 1.0
    assert share_fell(series) == 1 / 4


def test_of_a_metric_that_only_rises_the_variation_is_its_gain():
    series = np.cumsum(np.random.default_rng(0).random(20))
    assert total_variation(series) == pytest.approx(series[-1] - series[0])
    assert share_fell(series) == 0


def test_udp_by_hand():
    losses = [2.0, 1.0, 1.5, 1.75, 1.75]  # a fall, rises of 1/2 and 1/4, level
    assert udp(losses, 0.0) == 2 / 4
    assert udp(losses, 0.25) == 1 / 4  # more than δ, not δ itself
    assert udp(losses, 0.5) == 0


def test_udp_of_norms_counts_every_round():
    assert udp_norm([0.0, 1.0, 1.5, 3.0], 1.0) == 2 / 4
    assert udp_norm([0.0], 0.0) == 0


@pytest.mark.parametrize("measure", [total_variation, share_fell, lambda series: udp(series, 0.0)])
def test_a_single_round_has_none_before_it(measure):
    assert measure([0.5]) == 0


def test_straightness():
    assert straightness(2.0, 2.0) == 1
    assert straightness(0.0, 2.0) == 0
    assert straightness(1.5, 2.0) == 0.75
    assert straightness(0.0, 0.0) == 1
    assert straightness(np.nextafter(2.0, 3.0), 2.0) == 1  # rounding


@pytest.mark.parametrize("lengths", [(-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_straightness_needs_lengths(lengths):
    with pytest.raises(ValueError, match="two finite lengths"):
        straightness(*lengths)


@pytest.mark.parametrize("series", [[], [0.1, math.nan], [math.inf]])
@pytest.mark.parametrize(
    "measure", [total_variation, share_fell, lambda series: udp(series, 0.0), lambda series: udp_norm(series, 0.0)]
)
def test_stability_needs_finite_values(measure, series):
    with pytest.raises(ValueError, match="finite"):
        measure(series)
