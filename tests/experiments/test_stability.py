"""How the global model moves and what it forgets: small trajectories by hand, and inside a run."""

import math

import numpy as np
import pytest
import torch
from flwr.common import Parameters, ndarrays_to_parameters

from experiments import tracked_strategy
from experiments.stability import Stability
from strategies import LayerMap

from .test_tracking import Scripted, records, serve, tracker


def model(*values):
    """A model of one float32 tensor for each value, of two entries."""
    return ndarrays_to_parameters([np.array([value, 0], np.float32) for value in values])


def stability(layers=None, loss=0.0, norm=1.0):
    return Stability(layers, "accuracy", udp_loss_delta=loss, udp_norm_delta=norm)


def walk(models, **changes):
    """Measure a run whose models are these, and return what each round reports."""
    measured = stability(**changes)
    return [measured.measure(parameters, {"round": number}) for number, parameters in enumerate(models)]


def test_a_walk_by_hand():
    start, *rounds = walk([model(0, 0), model(3, 4), model(3, 0), model(3, 2)])
    assert start == {}
    names = ("step_norm", "path_length", "distance_from_start", "straightness", "udp_norm")
    expected = [
        (5, 5, 5, 1, 1),
        (4, 9, 3, 3 / 9, 1),
        (2, 11, math.sqrt(13), math.sqrt(13) / 11, 1),
    ]
    for found, values in zip(rounds, expected, strict=True):
        assert found == pytest.approx(dict(zip(names, values, strict=True)))


def test_a_straight_walk_has_straightness_1_and_one_that_comes_back_0():
    assert walk([model(value) for value in (0, 0.25, 1, 1.5)])[-1]["straightness"] == 1
    assert walk([model(value) for value in (0, 1, 0)])[-1]["straightness"] == 0


@pytest.mark.parametrize("scale", [1e-15, 1, 1e15])
def test_lengths_scale_and_shares_do_not(scale):
    values = np.random.default_rng(0).standard_normal((5, 3))
    one = walk([model(*row) for row in values])[-1]
    other = walk([model(*(scale * row)) for row in values], norm=scale)[-1]
    for name in ("step_norm", "path_length", "distance_from_start"):
        assert other[name] == pytest.approx(scale * one[name], rel=1e-5)
    assert other["straightness"] == pytest.approx(one["straightness"], rel=1e-5)
    assert other["udp_norm"] == one["udp_norm"]


def test_small_steps_of_a_large_model_are_not_lost():
    """Differences are taken in float64: in float32, 1e8 + 1 is 1e8."""
    large = np.full(1000, 1e8, np.float32)
    steps = walk([ndarrays_to_parameters([large + np.float32(8 * number)]) for number in range(3)])
    assert steps[2]["step_norm"] == pytest.approx(8 * math.sqrt(1000), rel=1e-12)


def test_a_failed_round_is_a_round_and_no_step():
    start, moved = model(0), model(2)
    found = walk([start, start, moved, model(2)])  # the third model is equal, and another object
    assert [row.get("step_norm") for row in found] == [None, 0, 2, 0]
    assert found[-1]["udp_norm"] == pytest.approx(1 / 3)
    assert found[1]["straightness"] == 1
    assert found[-1]["path_length"] == 2


def test_only_trainable_tensors_count():
    module = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
    layers = LayerMap.from_module(module)
    before = [tensor.numpy().copy() for tensor in module.state_dict().values()]
    after = [array + (1 if kind == "trainable" else 100) for array, kind in zip(before, layers.kinds, strict=True)]
    after = [array.astype(old.dtype) for array, old in zip(after, before, strict=True)]
    found = walk([ndarrays_to_parameters(before), ndarrays_to_parameters(after)], layers=layers)
    assert found[1]["step_norm"] == pytest.approx(math.sqrt(3))  # one weight, and scale and shift of the norm


def test_losses_and_scores_so_far():
    measured = stability(loss=0.25)
    rows = [
        {"round": 0, "accuracy": 0.25},
        {"round": 1, "train_loss": 2.0},
        {"round": 2, "train_loss": 2.5, "accuracy": 0.75},
        {"round": 3, "train_loss": None, "accuracy": math.nan},
        {"round": 4, "train_loss": 2.75, "accuracy": 0.5},
    ]
    first, second, third, fourth, last = [measured.measure(None, row) for row in rows]
    assert first == {"forgetting": 0, "updatable": 0, "zeta": 0, "total_variation": 0, "share_fell": 0}
    assert second == {"udp_loss": 0}
    assert third == {
        "udp_loss": 1, "forgetting": 0, "updatable": -0.5, "zeta": -0.5, "total_variation": 0.5, "share_fell": 0,
    }  # fmt: skip
    assert fourth == {"udp_loss": 1}
    assert last == {
        "udp_loss": 1 / 2, "forgetting": 0.25, "updatable": -0.25, "zeta": 0, "total_variation": 0.75,
        "share_fell": 1 / 2,
    }  # fmt: skip


def test_the_loss_of_a_failed_round_does_not_count():
    """Clients trained, but the model stayed: 2, 1.5 and 1 is a loss that only falls, whatever is reported between."""
    measured = stability()
    rounds = [(2.0, False), (9.0, True), (1.5, False), (9.0, True), (1.0, None), (1.25, False)]
    rows = [{"round": n, "train_loss": loss, "failed_round": failed} for n, (loss, failed) in enumerate(rounds, 1)]
    assert [measured.measure(None, row)["udp_loss"] for row in rows] == [0, 0, 0, 0, 0, pytest.approx(1 / 3)]
    assert stability().measure(None, {"round": 1, "train_loss": 2.0, "failed_round": True}) == {}


def test_the_model_is_decoded_once_a_round(monkeypatch):
    from experiments import stability as module

    calls = []
    decode = module.decode_all
    monkeypatch.setattr(module, "decode_all", lambda parameters: calls.append(parameters) or decode(parameters))
    walk([model(number) for number in range(4)])
    assert len(calls) == 4


def test_every_round_of_a_run_has_it(tmp_path):
    class Walking(Scripted):
        def aggregate_fit(self, server_round, results, failures):
            steps = {1: model(1), 2: None, 3: model(3)}  # no model: the round failed
            return steps[server_round], {"train_loss": 1.0 + server_round % 2, "straightness": 7}

        def evaluate(self, server_round, parameters):
            return 0.5, {"accuracy": (0.25, 0.5, 0.5, 0.375)[server_round]}

    with tracker(tmp_path, num_rounds=3) as run:
        strategy = tracked_strategy.TrackedStrategy(
            Walking(initialize_parameters=model(0)), run, stability=stability(norm=1.5)
        )
        serve(strategy, 3)
    rows = records(tmp_path)
    assert [row.get("step_norm") for row in rows] == [None, 1, 0, 2]
    assert [row.get("udp_norm") for row in rows] == [None, 0, 0, pytest.approx(1 / 3)]
    assert [row.get("udp_loss") for row in rows] == [None, 0, 0, 1 / 2]
    assert [row["forgetting"] for row in rows] == [0, 0, 0, 0.25]
    assert [row["share_fell"] for row in rows] == [0, 0, 0, pytest.approx(1 / 3)]
    assert rows[3]["straightness"] == 1
    assert rows[3]["fit_straightness"] == 7  # what the strategy reports under that name is kept


def test_without_an_evaluation_at_the_start_the_way_begins_there(tmp_path):
    answers = {"initialize_parameters": model(0), "aggregate_fit": (model(2), {})}
    with tracker(tmp_path, num_rounds=1) as run:
        serve(tracked_strategy.TrackedStrategy(Scripted(**answers), run, stability=stability()), 1)
    assert [(row["round"], row["distance_from_start"]) for row in records(tmp_path)] == [(1, 2)]


LENGTHS = {"step_norm", "path_length", "distance_from_start", "straightness", "udp_norm"}


def huge(value):
    return ndarrays_to_parameters([np.full(3, value)])


@pytest.mark.parametrize(
    "models",
    [
        [huge(0.0), huge(1e200)],  # its square is infinite
        [huge(0.0), huge(1e154), huge(-0.5e154), huge(1e154)],  # so is the sum of squares that are not
        [huge(-1.5e308), huge(1.5e308)],
        [huge(0.0), huge(math.inf), huge(math.inf)],
        [huge(0.0), huge(math.nan)],
    ],
)
def test_lengths_that_are_not_finite_are_nan(models):
    found = walk(models)[-1]
    assert found.keys() == LENGTHS
    assert math.isnan(found["path_length"])
    assert math.isnan(found["straightness"])
    assert not any(math.isinf(value) for value in found.values())


@pytest.mark.parametrize(
    "other", [model(1, 2), ndarrays_to_parameters([np.zeros(3, np.float32)]), Parameters([b"junk"], "numpy.ndarray")]
)
def test_the_way_to_another_kind_of_model_is_nan_and_logged(other, caplog):
    measured = stability()
    rows = [
        measured.measure(parameters, {"round": n, "accuracy": 0.5}) for n, parameters in enumerate([model(0), other])
    ]
    assert all(math.isnan(rows[1][name]) for name in LENGTHS)
    assert rows[1]["zeta"] == 0
    assert "the way of the global model cannot be measured: " in caplog.text
    from_there = walk([other, model(0)] if other.tensors == [b"junk"] else [other, other])
    assert math.isnan(from_there[1]["path_length"]) == (other.tensors == [b"junk"])


def test_scores_and_losses_beyond_every_sum_are_nan():
    measured = stability()
    for number, value in enumerate((-1.7e308, 1.7e308, -1.7e308)):
        found = measured.measure(None, {"round": number, "accuracy": value, "train_loss": value})
    assert math.isnan(found["total_variation"])
    assert found["share_fell"] == found["udp_loss"] == 0.5


class Broken:
    """A measure that fails in every way."""

    def start(self, parameters):
        raise OverflowError("too far")

    def measure(self, parameters, record):
        raise ValueError("no such length")


def test_a_failure_to_measure_loses_no_round_and_hides_no_error(tmp_path, caplog):
    answers = {"initialize_parameters": model(0), "evaluate": (0.5, {"accuracy": 0.25})}
    answers |= {"aggregate_fit": KeyError("the strategy's own")}
    with pytest.raises(KeyError, match="the strategy's own"), tracker(tmp_path, num_rounds=1) as run:
        serve(tracked_strategy.TrackedStrategy(Scripted(**answers), run, stability=Broken()), 1)
    rows = records(tmp_path)
    assert [(row["round"], row.get("accuracy"), row.get("error")) for row in rows] == [
        (0, 0.25, None), (1, None, "KeyError: \"the strategy's own\""),
    ]  # fmt: skip
    assert "round 1: forgetting and stability cannot be measured: ValueError: no such length" in caplog.text
    assert "cannot be noted: OverflowError: too far" in caplog.text


def test_a_model_that_grew_beyond_measure_is_null_in_its_record(tmp_path):
    answers = {"initialize_parameters": huge(0.0), "aggregate_fit": (huge(1e200), {})}
    with tracker(tmp_path, num_rounds=1) as run:
        serve(tracked_strategy.TrackedStrategy(Scripted(**answers), run, stability=stability()), 1)
    (row,) = records(tmp_path)
    assert {row[name] for name in LENGTHS} == {None}
