"""Rounds, models and options that cannot be used, beyond `test_contract.py`: said in one sentence."""

import logging

import numpy as np
import pytest
import torch
from flwr.common import ndarrays_to_parameters

from strategies import AFL, CRAFT, FedAvg, FedAvgM, FedNova, FedProx, QFedAvg
from strategies.solvers import craft

from .helpers import arrays_of, initial, manager, model, result, results, trained


def test_a_success_ends_the_row_of_failures():
    s = FedAvg(initial_parameters=initial(), max_failed_rounds=2)
    for number in (1, 3, 5):
        assert s.aggregate_fit(number, [], [RuntimeError("x")])[1]["failed_round"] is True
        assert s.aggregate_fit(number + 1, results(model()), [])[1]["failed_round"] is False


@pytest.mark.parametrize(
    ("min_completed", "accepted", "failed"),
    [(None, 5, False), (None, 4, True), (3, 3, False), (3, 2, True), (0.9, 9, False), (0.9, 8, True), (0.0, 1, False)],
)
def test_min_completed(min_completed, accepted, failed):
    s = FedAvg(initial_parameters=initial(), min_completed=min_completed)
    s.configure_fit(1, initial(), manager(map(str, range(10))))
    _, metrics = s.aggregate_fit(1, results(model(), accepted), [RuntimeError("gone")] * (10 - accepted))
    assert metrics["failed_round"] is failed


def test_accept_failures_off_fails_the_round():
    s = FedAvg(initial_parameters=initial(), accept_failures=False)
    _, metrics = s.aggregate_fit(1, results(model()), [RuntimeError("gone")])
    assert metrics["failed_round"] is True


def test_a_step_that_overflows_is_a_failed_round_with_advice():
    start = [np.full(2, 3e38, np.float32)]
    s = FedAvg(initial_parameters=ndarrays_to_parameters(start), server_lr=100.0)
    theta, metrics = s.aggregate_fit(1, [result(0, [np.full(2, 1e38, np.float32)])], [])
    np.testing.assert_array_equal(arrays_of(theta)[0], start[0])
    assert metrics["failed_round"] is True
    assert "lower server_lr" in metrics["failed_reason"]


def test_a_norm_that_grows_without_bound_is_reported(caplog):
    s = CRAFT(initial_parameters=ndarrays_to_parameters([np.zeros(2, np.float32)]), server_lr=1e6)
    with caplog.at_level(logging.WARNING):
        s.aggregate_fit(1, [result(0, [np.ones(2, np.float32)])], [])
    assert "diverges" in caplog.text


def test_no_global_model_is_one_sentence():
    with pytest.raises(ValueError, match="no global model"):
        FedAvg().aggregate_fit(1, results(model()), [])
    with pytest.raises(ValueError, match="NaN or Inf in tensor 'tensor0'"):
        FedAvg().configure_fit(1, ndarrays_to_parameters([np.array([np.nan])]), manager("ab"))
    with pytest.raises(ValueError, match="no tensors"):
        FedAvg().configure_fit(1, ndarrays_to_parameters([]), manager("ab"))


@pytest.mark.parametrize(
    "options",
    [
        {"server_lr": 0.0},
        {"server_lr": float("nan")},
        {"server_lr_decay": 0.0},
        {"server_lr_decay": 1.1},
        {"seed": -1},
        {"min_completed": 1.5},
        {"min_completed": 0},
        {"min_completed": True},
        {"min_completed": "half"},
        {"max_failed_rounds": 0},
        {"max_failed_rounds": 1.5},
        {"server_lr": True},
        {"server_lr": "fast"},
        {"seed": 1.5},
        {"wait_timeout": None},
        {"fraction_fit": float("nan")},
        {"layers": torch.nn.Linear(1, 1)},
        {"device": "warp"},
        {"device": None},
    ],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FedAvg(**options)


def test_numpy_numbers_are_numbers():
    s = FedAvg(min_completed=np.int64(2), seed=np.int64(3), server_lr=np.float32(0.5), initial_parameters=initial())
    assert s.aggregate_fit(1, results(model()), [])[1]["failed_round"] is False


def test_options_of_the_methods_out_of_range_are_named():
    with pytest.raises(ValueError, match="scale"):
        CRAFT(scale="huge")
    with pytest.raises(ValueError, match="constraint"):
        CRAFT(constraint="none")
    with pytest.raises(ValueError, match="server_momentum"):
        FedAvgM(server_momentum=1.0)
    with pytest.raises(TypeError, match="fraction_fitt"):
        FedAvg(fraction_fitt=0.1)


def test_functions_that_return_nothing_are_no_trouble():
    s = FedAvg(initial_parameters=initial(), fit_metrics_aggregation_fn=lambda _: None, on_fit_config_fn=lambda _: None)
    assert s.configure_fit(1, initial(), manager("ab"))[0][1].config == {"server_round": 1}
    assert s.aggregate_fit(1, results(model()), [])[1]["failed_round"] is False


def test_the_users_own_metrics_join_ours():
    s = FedAvg(initial_parameters=initial(), fit_metrics_aggregation_fn=lambda pairs: {"clients_seen": len(pairs)})
    sent = [result(i, a, 10 * (i + 1), {"train_loss": float(i)}) for i, a in enumerate(trained(model(), 2))]
    metrics = s.aggregate_fit(1, sent, [])[1]
    assert metrics["clients_seen"] == 2
    assert metrics["train_loss"] == pytest.approx(2 / 3)


def test_the_strategy_and_the_solver_agree():
    start = [np.zeros(6)]
    G = np.random.default_rng(2).normal(size=(3, 6))
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), server_lr=1.0)
    theta = arrays_of(s.aggregate_fit(1, [result(i, [g], i + 1) for i, g in enumerate(G)], [])[0])[0]
    direct = craft.solve(torch.tensor(G), torch.tensor([1, 2, 3]) / 6)
    np.testing.assert_allclose(theta, direct.direction, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (AFL, "initial_loss", 1e308),
        (QFedAvg, "initial_loss", 10**400),
        (QFedAvg, "initial_loss", -1e-9),
        (FedNova, "step_weight", 1e-320),
        (FedNova, "step_weight", 1e18),
        (FedNova, "step_weight", True),
    ],
)
def test_a_report_out_of_range_costs_the_client_not_the_round(make, key, value):
    good = results(model())
    theta, metrics = make(initial_parameters=initial()).aggregate_fit(
        1, [*good, result(9, trained(model(), 1)[0], metrics={key: value})], []
    )
    assert metrics["clients_rejected"] == 1
    assert key in metrics["rejection_reasons"]
    assert theta.tensors == make(initial_parameters=initial()).aggregate_fit(1, good, [])[0].tensors


def test_what_a_method_asks_of_clients_wins_over_the_users_config():
    asked = {"proximal_mu": 0.0, "server_round": 77, "batch": 5}
    s = FedProx(proximal_mu=0.5, initial_parameters=initial(), on_fit_config_fn=lambda _: asked)
    config = s.configure_fit(1, initial(), manager("ab"))[0][1].config
    assert config == {"proximal_mu": 0.5, "server_round": 1, "batch": 5}
