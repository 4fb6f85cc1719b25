"""What a round does whatever the method: dtypes, order, memory, resuming."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.common import Parameters, ndarrays_to_parameters

from strategies import CRAFT, FedAvg, LayerMap

from .helpers import arrays_of, every_strategy, initial, manager, model, result, results, trained


@every_strategy
def test_dtypes_shapes_counters_and_buffers(make, device):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).half()
    start = [t.numpy() for t in module.state_dict().values()]
    layers = LayerMap.from_module(module)
    var, count = layers.names.index("1.running_var"), layers.names.index("1.num_batches_tracked")
    sent = []
    for i, (n, v) in enumerate([(10, 0.5), (30, 2.5)]):
        arrays = trained(start, 1, seed=i)[0]
        arrays[var] = np.full(4, v, np.float16)
        arrays[count] = np.array(7 - 3 * i)
        sent.append(result(i, arrays, n))
    s = make(layers=layers, initial_parameters=ndarrays_to_parameters(start), device=device)
    theta = arrays_of(s.aggregate_fit(1, sent, [])[0])
    assert [(a.dtype, a.shape) for a in theta] == [(a.dtype, a.shape) for a in start]
    np.testing.assert_array_equal(theta[var], np.full(4, 2.0, np.float16))
    assert theta[count] == 7
    assert any(not np.array_equal(a, b) for a, b in zip(theta, start, strict=True))


@every_strategy
def test_the_order_of_arrival_does_not_matter(make):
    sent = results(model(), 7)
    one, _ = make(initial_parameters=initial()).aggregate_fit(1, sent, [])
    two, _ = make(initial_parameters=initial()).aggregate_fit(1, sent[::-1], [])
    assert one.tensors == two.tensors


@every_strategy
def test_identical_clients_move_the_model_along_their_update(make):
    start, client = model(), trained(model(), 1)[0]
    theta = arrays_of(make(initial_parameters=initial()).aggregate_fit(1, [result(i, client) for i in range(5)], [])[0])
    for a, b, c in list(zip(theta, start, client, strict=True))[:2]:
        cosine = ((a - b).ravel() @ (c - b).ravel()) / (np.linalg.norm(a - b) * np.linalg.norm(c - b))
        assert cosine == pytest.approx(1, abs=1e-5)


@every_strategy
def test_clients_that_send_back_the_model_leave_it(make):
    theta, metrics = make(initial_parameters=initial()).aggregate_fit(1, [result(i, model()) for i in range(3)], [])
    for a, b in zip(arrays_of(theta), model(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["failed_round"] is False
    assert "cosine_to_mean" not in metrics


@every_strategy
@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_huge_and_tiny_updates(make, factor):
    start = [np.zeros((3, 2)), np.zeros(4)]
    sent = [result(i, a) for i, a in enumerate(trained(start, 4, scale=factor))]
    theta, metrics = make(initial_parameters=ndarrays_to_parameters(start)).aggregate_fit(1, sent, [])
    assert metrics["failed_round"] is False
    assert all(np.isfinite(a).all() and a.any() for a in arrays_of(theta))


@every_strategy
def test_inputs_are_not_changed_and_outputs_do_not_alias(make):
    sent = results(model())
    before = [list(r.parameters.tensors) for _, r in sent]
    s = make(initial_parameters=initial())
    first, _ = s.aggregate_fit(1, sent, [])
    kept = [bytes(t) for t in first.tensors]
    s.aggregate_fit(2, results(arrays_of(first), seed=5), [])
    assert [list(r.parameters.tensors) for _, r in sent] == before
    assert first.tensors == kept


@every_strategy
def test_lent_memory_gives_the_same_model_and_is_let_go(make):
    """An engine lends each result in memory that it takes back once `aggregate_fit` has returned."""
    sent = results(model(), 5)
    expected, _ = make(initial_parameters=initial()).aggregate_fit(1, sent, [])
    s = make(initial_parameters=initial())
    owners = [[bytearray(t) for t in r.parameters.tensors] for _, r in sent]
    before = [[bytes(t) for t in tensors] for tensors in owners]
    lent = []
    for i, ((_, res), tensors) in enumerate(zip(sent, owners, strict=True)):
        views = [memoryview(t) if i % 2 else np.frombuffer(t, np.uint8) for t in tensors]
        lent.append(result(i, Parameters(views, "numpy.ndarray"), res.num_examples))
    lent.append(lent[0])  # a duplicate, and one that is rejected
    lent.append(result(99, Parameters([memoryview(b"junk")] * 4, "numpy.ndarray")))
    gc.disable()  # references must not hang in a cycle either
    try:
        theta, _ = s.aggregate_fit(1, lent, [])
        assert theta.tensors == expected.tensors
        assert [[bytes(t) for t in tensors] for tensors in owners] == before
        del views, lent
        for tensors in owners:
            for t in tensors:
                t.append(0)  # refused while anything views it
    finally:
        gc.enable()


@every_strategy
def test_decoded_results_give_the_same_model_as_their_bytes(make):
    arrays = [[np.asarray(a) for a in client] for client in trained(model(), 5)]
    for a in [a for client in arrays for a in client]:
        a.flags.writeable = False
    decoded = [result(i, Parameters(a, "numpy.ndarray"), 10 + i) for i, a in enumerate(arrays)]
    encoded = [result(i, a, 10 + i) for i, a in enumerate(arrays)]
    one, _ = make(initial_parameters=initial()).aggregate_fit(1, decoded, [])
    two, _ = make(initial_parameters=initial()).aggregate_fit(1, encoded, [])
    assert one.tensors == two.tensors


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@every_strategy
def test_thirty_rounds_take_no_more_memory_than_a_few(make):
    start = [np.zeros((1000, 1000), np.float32)]  # 4 MB
    s = make(initial_parameters=ndarrays_to_parameters(start))
    sent = results(start, 3)

    def resident_mb():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    for number in range(1, 6):
        s.aggregate_fit(number, sent, [])
    before = resident_mb()
    for number in range(6, 36):
        s.aggregate_fit(number, sent, [])
    assert resident_mb() - before < 60  # a leak of one model a round is 120


@every_strategy
def test_a_resumed_run_continues_bit_for_bit(make):
    def play(s, numbers, theta):
        clients = manager(map(str, range(10)))
        for number in numbers:
            chosen = s.configure_fit(number, theta, clients)
            ins = chosen[0][1]
            sent = [
                result(p.cid, a, 10 + int(p.cid))
                for (p, _), a in zip(
                    chosen, trained(arrays_of(theta), len(chosen), seed=ins.config["server_round"]), strict=True
                )
            ]
            theta, _ = s.aggregate_fit(number, sent, [])
        return theta

    options = {"seed": 3, "fraction_fit": 0.4, "server_lr_decay": 0.9}
    whole = make(**options)
    expected = play(whole, range(1, 6), initial())
    for numbers in (range(1, 4), range(3, 6)):  # Flower counts anew from 1; a caller may count on
        half = make(**options)
        theta = play(half, (1, 2), initial())
        resumed = make(**options)
        resumed.load_state_dict(json_round_trip(half.state_dict()))
        assert play(resumed, numbers, theta).tensors == expected.tensors


@every_strategy
@pytest.mark.parametrize("clients", [1, 2])
def test_few_clients_with_a_large_layer(make, clients):
    start = [np.zeros((600, 600), np.float32)]
    s = make(initial_parameters=ndarrays_to_parameters(start))
    parameters, metrics = s.aggregate_fit(1, results(start, clients), [])
    assert metrics["clients_accepted"] == clients
    assert np.isfinite(arrays_of(parameters)[0]).all()
    assert np.any(arrays_of(parameters)[0])


def json_round_trip(state):
    """What a checkpoint does: everything but the tensors through JSON."""
    return {**json.loads(json.dumps({k: v for k, v in state.items() if k != "memory"})), "memory": state["memory"]}


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
def test_a_damaged_state_is_refused_and_changes_nothing(entry, value, words):
    s = CRAFT(initial_parameters=initial())
    s.aggregate_fit(1, results(model()), [])
    before = s.state_dict()
    with pytest.raises(ValueError, match=words):
        s.load_state_dict({**before, entry: value})
    after = s.state_dict()
    assert {k: v for k, v in after.items() if k != "memory"} == {k: v for k, v in before.items() if k != "memory"}
    assert all(torch.equal(after["memory"][k], v) for k, v in before["memory"].items())


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
