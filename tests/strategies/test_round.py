"""What a round does whatever the method, beyond `test_contract.py`: size, resident memory, words and numbers."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.common import ndarrays_to_parameters

from strategies import CRAFT, FedAvg, FedFV

from .helpers import arrays_of, every_strategy, initial, manager, model, result, results


@pytest.fixture
def one_thread():
    """PyTorch's threads wait for each other at every step, which on a busy machine takes ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@every_strategy
def test_many_rounds_take_no_more_memory_than_a_few(make):
    start = [np.zeros((16, 62500), np.float32)]  # 4 MB
    s = make(initial_parameters=ndarrays_to_parameters(start))
    sent = results(start, 3)

    def resident_mb():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    for number in range(1, 6):
        s.aggregate_fit(number, sent, [])
    growth = []
    for first in range(6, 106, 20):
        before = resident_mb()
        for number in range(first, first + 20):
            s.aggregate_fit(number, sent, [])
        growth.append(resident_mb() - before)
        # A leak of one model a round is 80, every time. The heap of a process with a past may grow, but not each time.
        if growth[-1] < 40:
            return
    pytest.fail(f"resident memory grew by {growth} MB, 20 rounds each")


@every_strategy
@pytest.mark.parametrize("clients", [1, 2])
def test_few_clients_with_a_large_layer(make, clients):
    start = [np.zeros((60, 6000), np.float32)]
    s = make(initial_parameters=ndarrays_to_parameters(start))
    parameters, metrics = s.aggregate_fit(1, results(start, clients), [])
    assert metrics["clients_accepted"] == clients
    assert np.isfinite(arrays_of(parameters)[0]).all()
    assert np.any(arrays_of(parameters)[0])


def test_a_state_that_does_not_fit_is_refused():
    s = CRAFT(initial_parameters=initial())
    s.aggregate_fit(1, results(model()), [])
    state = s.state_dict()
    with pytest.raises(ValueError, match="belongs to CRAFT, this is FedAvg"):
        FedAvg().load_state_dict(state)
    with pytest.raises(ValueError, match="lacks round"):
        CRAFT().load_state_dict({k: v for k, v in state.items() if k != "round"})
    other = CRAFT(initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    with pytest.raises(ValueError, match="resume with the model that was saved"):
        other.load_state_dict(state)
    assert not other.memory
    late = CRAFT()
    late.load_state_dict(state)  # there is no model yet to compare with; the first that comes is refused, each time
    for _ in range(2):
        with pytest.raises(ValueError, match="resume with the model that was saved"):
            late.configure_fit(3, ndarrays_to_parameters([np.zeros(2)]), manager("ab"))


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("memory", None, "dict of tensors"),
        ("memory", {"reference/tensor0": torch.full((12,), torch.nan)}, "finite"),
        ("memory", {"reference/tensor0": torch.zeros(4, 3)}, "vector"),
        ("memory", {"velocity/tensor0": torch.zeros(12)}, "not one this strategy keeps"),
        ("memory", {"reference/tensor9": torch.zeros(12)}, "no such layer"),
        ("round", "three", "round"),
        ("failed_rounds", -1, "failed_rounds"),
        ("start_norm", "long", "start_norm"),
    ],
)
def test_what_is_wrong_with_a_state_is_said(entry, value, words):
    s = CRAFT(initial_parameters=initial())
    s.aggregate_fit(1, results(model()), [])
    with pytest.raises(ValueError, match=words):
        s.load_state_dict({**s.state_dict(), entry: value})


def test_a_state_that_lost_the_past_of_one_layer_is_refused():
    s = FedFV(initial_parameters=initial())
    s.aggregate_fit(1, results(model()), [])
    state = s.state_dict()
    del state["memory"]["past/tensor1"]
    with pytest.raises(ValueError, match="'past' of other layers but not of 'tensor1'"):
        s.load_state_dict(state)
    late = FedFV()
    late.load_state_dict(state)  # there is no model yet that says which layers there are
    with pytest.raises(ValueError, match="not of 'tensor1'"):
        late.configure_fit(2, initial(), manager("ab"))


def test_an_angle_to_no_mean_is_left_out():
    s = FedAvg(initial_parameters=initial())
    metrics = s.aggregate_fit(1, [result(i, model()) for i in range(3)], [])[1]
    assert "cosine_to_mean" not in metrics
    assert metrics["direction_norm"] == 0


def test_evaluating_first_after_a_resume_does_not_shift_the_rounds():
    s = FedAvg(initial_parameters=initial(), server_lr_decay=0.5)
    for number in (1, 2):
        s.aggregate_fit(number, results(model()), [])
    resumed = FedAvg(initial_parameters=initial(), server_lr_decay=0.5, evaluate_fn=lambda t, arrays, config: (t, {}))
    resumed.load_state_dict(s.state_dict())
    assert resumed.evaluate(2, initial())[0] == 2
    assert resumed.configure_evaluate(2, initial(), manager("ab"))[0][1].config["server_round"] == 2
    assert resumed.configure_fit(3, initial(), manager("ab"))[0][1].config["server_round"] == 3
    assert resumed.evaluate(3, initial())[0] == 3
