"""One round of any strategy: sampling, vetting, applying, failing, remembering."""

import json
import logging

import flwr.server.strategy
import numpy as np
import pytest
import torch
from flwr.common import Code, EvaluateRes, GetPropertiesRes, Status, ndarrays_to_parameters

from client_apps import models
from strategies import CRAFT, FedAvg, FedAvgM, LayerMap, NotEnoughClients, RoundsFailed, partition_order
from strategies.solvers import craft

from .helpers import Proxy, arrays_of, manager, model, result, trained

ALL = [
    lambda **k: CRAFT(**k),
    lambda **k: CRAFT(scale="mean_norm", server_lr=1.0, **k),
    lambda **k: FedAvg(**k),
    lambda **k: FedAvgM(**k),
]
every_strategy = pytest.mark.parametrize("make", ALL, ids=["craft", "craft-mean-norm", "fedavg", "fedavgm"])


def initial(seed=0):
    return ndarrays_to_parameters(model(seed))


def results(start, count=4, seed=1, sizes=(10, 20, 30, 40)):
    return [result(i, a, sizes[i % len(sizes)]) for i, a in enumerate(trained(start, count, seed))]


# ---- the methods -----------------------------------------------------------------------------------------------


def test_fedavg_is_flowers_fedavg(device):
    sent = results(model())
    ours, metrics = FedAvg(initial_parameters=initial(), device=device).aggregate_fit(1, sent, [])
    theirs, _ = flwr.server.strategy.FedAvg(fit_metrics_aggregation_fn=lambda m: {}).aggregate_fit(1, sent, [])
    for a, b in zip(arrays_of(ours)[:3], arrays_of(theirs)[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert metrics["cosine_to_mean"] == pytest.approx(1)
    assert metrics["clients_accepted"] == 4


def test_fedavg_by_hand():
    start = [np.array([0.0, 0.0], np.float32)]
    sent = [result(0, [np.array([1, 0], np.float32)], 30), result(1, [np.array([0, 2], np.float32)], 10)]
    theta, metrics = FedAvg(initial_parameters=ndarrays_to_parameters(start), server_lr=2.0).aggregate_fit(1, sent, [])
    np.testing.assert_allclose(arrays_of(theta)[0], [1.5, 1.0], rtol=1e-7)
    assert metrics["direction_norm"] == pytest.approx(np.hypot(0.75, 0.5))
    # min over clients of ⟨u_i, ḡ⟩
    assert metrics["min_alignment"] == pytest.approx(0.5)
    assert metrics["conflict_share_before"] == metrics["conflict_share_after"] == 0


def test_fedavgm_by_hand():
    # v1 = g1 = 1, θ1 = 1; v2 = .5·1 + (3 − 1) = 2.5, θ2 = 3.5.
    s = FedAvgM(server_momentum=0.5, initial_parameters=ndarrays_to_parameters([np.zeros(1)]), min_completed=1)
    one, _ = s.aggregate_fit(1, [result(0, [np.ones(1)])], [])
    assert arrays_of(one)[0] == pytest.approx([1.0])
    two, _ = s.aggregate_fit(2, [result(0, [np.full(1, 3.0)])], [])
    assert arrays_of(two)[0] == pytest.approx([3.5])


def test_fedavgm_without_momentum_is_fedavg():
    sent = results(model())
    one, _ = FedAvgM(server_momentum=0.0, initial_parameters=initial()).aggregate_fit(1, sent, [])
    two, _ = FedAvg(initial_parameters=initial()).aggregate_fit(1, sent, [])
    assert one.tensors == two.tensors


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_craft_is_its_formula_layer_by_layer(scale, device):
    """Two rounds against float64 pseudo-inverses written out here."""
    rng = np.random.default_rng(0)
    names = ["a.weight", "a.bias", "norm.weight", "norm.bias", "b.weight"]
    shapes = [(5, 4), (5,), (5,), (5,), (2, 5)]
    theta = [rng.normal(size=s).astype(np.float32) for s in shapes]
    groups = [[0, 1, 2, 3], [4]]
    s = CRAFT(
        layers=LayerMap.from_names(names, shapes),
        initial_parameters=ndarrays_to_parameters(theta),
        server_lr=0.5,
        server_lr_decay=0.9,
        scale=scale,
        device=device,
    )
    rho = np.array([0.2, 0.3, 0.5])
    previous = [None, None]
    for number in (1, 2):
        sent = [[(a + 0.1 * rng.normal(size=a.shape)).astype(np.float32) for a in theta] for _ in range(3)]
        parameters, metrics = s.aggregate_fit(
            number, [result(i, a, n) for i, (a, n) in enumerate(zip(sent, (20, 30, 50), strict=True))], []
        )
        expected = [a.astype(np.float64) for a in theta]
        for q, tensors in enumerate(groups):
            flat = [np.concatenate([c[t].astype(np.float64).ravel() for t in tensors]) for c in [*sent, theta]]
            G = np.stack(flat[:-1]) - flat[-1]
            norms = np.linalg.norm(G, axis=1)
            U = G / norms[:, None]
            ghat = np.zeros(G.shape[1]) if previous[q] is None else previous[q] / np.linalg.norm(previous[q])
            g = ghat + np.linalg.pinv(U) @ (rho - U @ ghat)
            if scale == "mean_norm":
                g = g / np.linalg.norm(g) * (rho @ norms)
            previous[q] = g
            offset = 0
            for t in tensors:
                part = g[offset : offset + theta[t].size].reshape(theta[t].shape)
                expected[t] = expected[t] + 0.5 * 0.9 ** (number - 1) * part
                offset += theta[t].size
        theta = arrays_of(parameters)
        for a, b in zip(theta, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        assert metrics["residual"] < 1e-9
        assert metrics["rank"] == 3
        assert metrics["conflict_share_after"] == 0
    if scale == "raw":
        assert metrics["min_alignment"] == pytest.approx(0.2, rel=1e-6)


def test_craft_on_a_resnet_20_is_a_float64_pseudo_inverse_per_module(device):
    """Two rounds over the 20 layers and 269,722 parameters of the authors' model."""
    torch.manual_seed(0)
    module = models.build({"name": "resnet", "depth": 20, "norm": "group"}, channels=3, side=32, num_classes=10)
    theta = [t.numpy() for t in module.state_dict().values()]
    layers, m, rng = LayerMap.from_module(module), 8, np.random.default_rng(0)
    sizes = rng.integers(5, 50, size=m)
    rho = sizes / sizes.sum()
    s = CRAFT(layers=layers, initial_parameters=ndarrays_to_parameters(theta), device=device)
    previous: dict[str, np.ndarray] = {}
    for number in (1, 2):
        sent = [[a + rng.normal(scale=0.01, size=a.shape).astype(np.float32) for a in theta] for _ in range(m)]
        results_ = [result(i, a, int(n)) for i, (a, n) in enumerate(zip(sent, sizes, strict=True))]
        after = arrays_of(s.aggregate_fit(number, results_, [])[0])
        for layer in layers.layers:
            rows = [np.concatenate([c[t].ravel().astype(np.float64) for t in layer.tensors]) for c in [*sent, theta]]
            U = np.stack(rows[:-1]) - rows[-1]
            U /= np.linalg.norm(U, axis=1, keepdims=True)
            ghat = previous.get(layer.name, np.zeros(layer.size))
            g = ghat + np.linalg.pinv(U, rcond=1e-10) @ (rho - U @ ghat)
            previous[layer.name] = g / np.linalg.norm(g)
            moved = np.concatenate([after[t].ravel() for t in layer.tensors])
            np.testing.assert_allclose(moved, rows[-1] + 0.1 * g, rtol=1e-5, atol=1e-7)
        theta = after


def test_craft_resolves_a_conflict_that_the_mean_leaves():
    # Client 1 has a tenth of the data and pulls the other way; the mean hurts it, CRAFT does not.
    start = ndarrays_to_parameters([np.zeros(2, np.float32)])
    sent = [result(0, [np.array([1.0, 0.1], np.float32)], 90), result(1, [np.array([-1.0, 0.1], np.float32)], 10)]
    _, mean = FedAvg(initial_parameters=start).aggregate_fit(1, sent, [])
    _, ours = CRAFT(initial_parameters=start).aggregate_fit(1, sent, [])
    assert mean["conflict_share_before"] == mean["conflict_share_after"] == 0.5
    assert ours["conflict_share_before"] == 0.5
    assert ours["conflict_share_after"] == 0
    assert ours["min_alignment"] == pytest.approx(0.1, rel=1e-6)


def test_one_client_is_solved_like_any_other():
    # The formula, not the client's raw update: length ρ = 1 along it.
    start = [np.zeros(3, np.float32)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), server_lr=1.0)
    theta, _ = s.aggregate_fit(1, [result(0, [np.array([0, 30, 40], np.float32)])], [])
    np.testing.assert_allclose(arrays_of(theta)[0], [0, 0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_opposite_clients_with_equal_shares_do_not_move_the_model_by_rounding(scale, device):
    rng = np.random.default_rng(3)
    v, w = rng.normal(size=(2, 50))
    start = ndarrays_to_parameters([np.zeros(50)])
    s = CRAFT(initial_parameters=start, scale=scale, server_lr=1.0, device=device)
    theta, _ = s.aggregate_fit(1, [result(i, [g]) for i, g in enumerate((v, -1.1 * v, 1.2 * w, -1.3 * w))], [])
    np.testing.assert_array_equal(arrays_of(theta)[0], 0)
    # Nothing was learnt, so the next round starts without a reference: one client alone gives its unit update.
    theta, _ = s.aggregate_fit(2, [result(0, [v])], [])
    expected = v / np.linalg.norm(v) if scale == "raw" else v
    np.testing.assert_allclose(arrays_of(theta)[0], expected, rtol=1e-9)


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_a_layer_that_nobody_changed_stays_and_keeps_its_reference(scale):
    start = [np.zeros(3), np.zeros(2)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), scale=scale, server_lr=1.0)
    one, _ = s.aggregate_fit(1, [result(0, [np.ones(3), np.ones(2)])], [])
    kept = s.memory["reference/tensor1"].clone()
    now = arrays_of(one)
    two, metrics = s.aggregate_fit(2, [result(0, [now[0] + 1, now[1]])], [])
    np.testing.assert_array_equal(arrays_of(two)[1], now[1])
    assert torch.equal(s.memory["reference/tensor1"], kept)
    assert metrics["rank"] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_clients_with_narrower_numbers_do_not_move_what_they_leave(dtype):
    """A float64 model that float32 clients return untouched has updates of zero, not of rounding errors."""
    start = [np.random.default_rng(0).normal(size=20), np.random.default_rng(1).normal(size=5)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), server_lr=1.0)
    sent = [[(start[0] + i + 1).astype(dtype), start[1].astype(dtype)] for i in range(2)]
    sent.append([start[0] - 1, start[1]])  # and one in full
    theta = arrays_of(s.aggregate_fit(1, [result(i, a) for i, a in enumerate(sent)], [])[0])
    np.testing.assert_array_equal(theta[1], start[1])
    assert theta[0].dtype == np.float64
    assert not np.array_equal(theta[0], start[0])


# ---- what holds for all -------------------------------------------------------------------------------------------


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


# ---- sampling ------------------------------------------------------------------------------------------------------


def test_sampling_depends_on_seed_and_round_only():
    def ids(s, number, clients):
        return [p.cid for p, _ in s.configure_fit(number, initial(), clients)]

    cids = [str(i) for i in range(50)]
    one, two = FedAvg(seed=1, fraction_fit=0.2), FedAvg(seed=1, fraction_fit=0.2)
    first = [ids(one, t, manager(cids)) for t in (1, 2, 3)]
    second = [ids(two, t, manager(cids[::-1])) for t in (1, 2, 3)]
    assert first == second
    assert all(len(x) == 10 and sorted(x, key=int) == x for x in first)
    assert first[0] != first[1]
    assert ids(FedAvg(seed=2, fraction_fit=0.2), 1, manager(cids)) != first[0]


def test_with_partitions_node_ids_do_not_matter():
    def partitions(offset):
        s = FedAvg(seed=1, fraction_fit=0.3, partition_order=lambda new: {c.cid: int(c.cid) % 100 for c in new})
        return [
            int(p.cid) % 100 for p, _ in s.configure_fit(1, initial(), manager([str(offset + i) for i in range(20)]))
        ]

    assert partitions(100) == partitions(7_300)


@pytest.mark.parametrize(("fraction", "available", "size"), [(7 / 30, 30, 7), (0.1, 1000, 100), (0.29, 100, 29)])
def test_a_fraction_gives_the_number_it_means(fraction, available, size):
    assert FedAvg(fraction_fit=fraction, min_fit_clients=1).num_fit_clients(available)[0] == size


def test_waiting_for_clients_that_never_come_ends_in_one_sentence():
    s = CRAFT(min_available_clients=5, wait_timeout=0.3)
    with pytest.raises(
        NotEnoughClients, match=r"needs 5 connected clients but only 3 are there.*lower min_available"
    ) as e:
        s.configure_fit(1, initial(), manager("abc"))
    assert "\n" not in str(e.value)


def test_clients_that_come_late_are_waited_for():
    clients = manager("ab")
    polls = iter("cde")
    count = clients.num_available

    def num_available():
        for cid in polls:
            clients.register(Proxy(cid))
            break
        return count()

    clients.num_available = num_available
    s = FedAvg(min_available_clients=5, wait_timeout=30.0)
    assert len(s.configure_fit(1, initial(), clients)) == 5


def test_config_carries_the_round_and_the_users_own():
    s = FedAvg(on_fit_config_fn=lambda t: {"lr": 0.1 / t})
    config = s.configure_fit(2, initial(), manager("ab"))[0][1].config
    assert config == {"server_round": 2, "lr": 0.05}


def test_clients_that_leave_while_they_are_counted_are_missed():
    clients = manager("abcde")
    count = clients.num_available

    def num_available():
        found = count()
        for proxy in list(clients.all().values())[:3]:
            clients.unregister(proxy)
        return found

    clients.num_available = num_available
    with pytest.raises(NotEnoughClients, match="only"):
        FedAvg(min_available_clients=5, wait_timeout=0.3).configure_fit(1, initial(), clients)


def test_silent_clients_are_asked_for_their_partition_once():
    asked = []

    def order(new):
        asked.extend(c.cid for c in new)
        return {}

    s = FedAvg(partition_order=order)
    for number in (1, 2):
        s.configure_fit(number, initial(), manager("abc"))
    assert asked == ["a", "b", "c"]


def test_partition_order_asks_the_clients():
    class Known(Proxy):
        def get_properties(self, ins, timeout, group_id):
            if self.cid == "mute":
                raise TimeoutError("no answer")
            if self.cid == "old":
                return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, ""), {})
            return GetPropertiesRes(Status(Code.OK, ""), {"partition-id": 7 * len(self.cid)})

    assert partition_order([Known(cid) for cid in ("a", "bb", "mute", "old")]) == {"a": 7, "bb": 14}


def test_too_few_clients_to_evaluate_on_skip_the_evaluation():
    s = FedAvg(min_available_clients=1, min_fit_clients=1)
    assert s.configure_evaluate(1, initial(), manager("a")) == []
    assert len(s.configure_evaluate(1, initial(), manager("abc"))) == 3


# ---- evaluation ------------------------------------------------------------------------------------------------


def evaluated(cid, loss, n=10, code=Code.OK):
    return Proxy(str(cid)), EvaluateRes(Status(code, ""), loss, n, {"correct": n})


def test_evaluation_is_weighted_and_leaves_out_what_means_nothing():
    s = FedAvg(evaluate_metrics_aggregation_fn=lambda pairs: {"correct": sum(m["correct"] for _, m in pairs)})
    good = [evaluated(0, 1.0, 10), evaluated(1, 2.0, 30)]
    bad = [
        evaluated(2, float("nan")),
        evaluated(3, 5.0, 0),
        evaluated(4, 5.0, code=Code.EVALUATE_NOT_IMPLEMENTED),
        good[0],
    ]
    for order in (good + bad, (good + bad)[::-1]):
        loss, metrics = s.aggregate_evaluate(1, order, [RuntimeError("gone")])
        assert loss == pytest.approx(1.75)
        assert metrics == {"correct": 40}
    assert s.aggregate_evaluate(1, bad[:2], []) == (None, {})


# ---- bad input -----------------------------------------------------------------------------------------------------


def poison(start, kind):
    arrays = trained(start, 1, seed=9)[0]
    n = 10
    if kind == "nan":
        arrays[0][0, 0] = np.nan
    elif kind == "shape":
        arrays[0] = arrays[0][:, :2]
    elif kind == "missing":
        arrays = arrays[:-1]
    elif kind == "zero":
        n = 0
    elif kind == "negative":
        n = -1
    return result(99, arrays, n)


@every_strategy
@pytest.mark.parametrize("kind", ["nan", "shape", "missing", "zero", "negative"])
def test_one_bad_client_is_left_out_and_named(make, kind, caplog):
    good = results(model())
    with caplog.at_level(logging.WARNING):
        theta, metrics = make(initial_parameters=initial()).aggregate_fit(1, [poison(model(), kind), *good], [])
    expected, _ = make(initial_parameters=initial()).aggregate_fit(1, good, [])
    assert theta.tensors == expected.tensors
    assert (metrics["clients_accepted"], metrics["clients_rejected"]) == (4, 1)
    assert "client 99" in json.loads(metrics["rejection_reasons"])[0]
    assert "client 99" in caplog.text


@every_strategy
def test_a_duplicate_client_counts_once(make):
    good = results(model())
    theta, metrics = make(initial_parameters=initial()).aggregate_fit(1, [*good, good[0]], [])
    assert theta.tensors == make(initial_parameters=initial()).aggregate_fit(1, good, [])[0].tensors
    assert metrics["clients_rejected"] == 1


@every_strategy
def test_failed_rounds_leave_the_model_and_end_in_one_sentence(make):
    s = make(initial_parameters=initial(), max_failed_rounds=3, seed=1)
    s.configure_fit(1, initial(), manager("abcd"))
    theta, metrics = s.aggregate_fit(1, [], [RuntimeError("boom")] * 4)
    assert theta.tensors == initial().tensors
    assert metrics["failed_round"] is True
    assert (metrics["clients_sampled"], metrics["clients_failed"]) == (4, 4)
    assert "boom" in metrics["failure_reasons"]
    theta, metrics = s.aggregate_fit(2, [], [])  # an empty round
    assert theta.tensors == initial().tensors
    assert metrics["failed_round"] is True
    with pytest.raises(RoundsFailed, match="3 rounds in a row failed") as error:
        s.aggregate_fit(3, [poison(model(), "nan")], [])
    assert "NaN" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.metrics["clients_rejected"] == 1


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


def test_an_update_too_large_to_square_is_rejected():
    start = [np.zeros(2)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start))
    theta, metrics = s.aggregate_fit(1, [result(0, [np.full(2, 1e200)]), result(1, [np.ones(2)])], [])
    np.testing.assert_allclose(arrays_of(theta)[0], 0.1 / np.sqrt(2), rtol=1e-12)
    assert "client 0: tensor 'tensor0' holds values too large" in metrics["rejection_reasons"]


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
