"""CLAIR, Local and OracleFedAvg in rounds of plain Flower objects: who receives what, who is left out, what is kept."""

import json

import numpy as np
import pytest
import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

from strategies import CLAIR, FedAvg, LayerMap, Local, OracleFedAvg
from strategies.solvers import clair, lowrank

from .helpers import arrays_of, manager, result

Q, P, R = 10, 20, 2
NAMES = ("layer.weight", "layer.bias", "head.weight", "norm.running_mean", "norm.num_batches_tracked")
SHAPES = ((Q, P), (Q,), (8, 12), (3,), ())


def start(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [
        *(rng.normal(size=shape).astype(dtype) for shape in SHAPES[:4]),
        np.array(5, dtype=np.int64),
    ]


def models(benign, contaminated, seed=1, dtype=np.float32, noise=0.075):
    """Clients' models: benign ones share a row space in both matrices, the others have their own, further off."""
    rng = np.random.default_rng(seed)
    origin = start(np.float64)
    bases = {i: np.linalg.qr(rng.normal(size=(SHAPES[i][1], R)))[0].T for i in (0, 2)}
    found = []
    for k in range(benign + contaminated):
        arrays = [np.array(a, dtype=np.float64) for a in origin]
        for i in (0, 2):
            q, p = SHAPES[i]
            if k < benign:
                own = rng.normal(size=(q, R)) / np.sqrt(q) @ bases[i]
            else:
                own = rng.normal(size=(q, R)) @ np.linalg.qr(rng.normal(size=(p, R)))[0].T
            arrays[i] += own + noise * rng.normal(size=(q, p))
        arrays[1] += rng.normal(size=Q)
        arrays[3] += k
        arrays[4] = np.array(5 + k)
        found.append([a.astype(dtype) for a in arrays[:4]] + [arrays[4].astype(np.int64)])
    return found


def layer_map():
    return LayerMap.from_names(NAMES, SHAPES)


def make(cls=CLAIR, **options):
    options = {"initial_parameters": ndarrays_to_parameters(start()), "layers": layer_map(), "device": "cpu", **options}
    return cls(
        fraction_fit=1.0,
        fraction_evaluate=1.0,
        min_available_clients=1,
        min_fit_clients=1,
        min_evaluate_clients=1,
        **options,
    )


def play(strategy, number, clients, sizes=None, parameters=None):
    """One round of these clients, {id: arrays}: configured, aggregated, and configured for evaluation."""
    parameters = parameters or strategy.initial_parameters
    people = manager(list(clients))
    asked = strategy.configure_fit(number, parameters, people)
    results = [
        result(cid, arrays, (sizes or {}).get(cid, 10), {"initial_loss": 1.0}) for cid, arrays in clients.items()
    ]
    parameters, metrics = strategy.aggregate_fit(number, results, [])
    shown = {
        client.cid: arrays_of(ins.parameters) for client, ins in strategy.configure_evaluate(number, parameters, people)
    }
    return (
        {client.cid: arrays_of(ins.parameters) for client, ins in asked},
        shown,
        arrays_of(parameters),
        metrics,
        parameters,
    )


def ids(count):
    return [str(i) for i in range(count)]


def stack(found, index):
    return torch.tensor(np.stack([arrays[index] for arrays in found]), dtype=torch.float64)


def test_members_receive_what_the_solver_refines_and_the_others_the_global_model():
    found = models(8, 2)
    _, shown, global_model, metrics, parameters = play(make(), 1, dict(zip(ids(10), found, strict=True)))
    expected = clair.solve_jointly([stack(found, 0), stack(found, 2)], refit=True)
    assert expected[0].members.tolist() == [True] * 8 + [False] * 2
    for cid in ids(10):
        for solution, i in zip(expected, (0, 2), strict=True):
            wanted = solution.refined[int(cid)] if int(cid) < 8 else solution.mean
            np.testing.assert_allclose(shown[cid][i], wanted.numpy(), rtol=2e-6, atol=2e-6)
        for i in (1, 3, 4):
            np.testing.assert_array_equal(shown[cid][i], global_model[i])
    for i in (0, 1, 2, 3):  # the mean of the members' models, and of their refined ones
        np.testing.assert_allclose(
            global_model[i], np.mean([np.float64(f[i]) for f in found[:8]], axis=0), rtol=2e-6, atol=2e-6
        )
    assert global_model[4] == 5 + 7
    listed = json.loads(metrics["contaminated_clients"])
    assert [entry["client"] for entry in listed] == ["8", "9"]
    assert all(entry["margin"] < 0 and entry["comparisons"] == 2 * 9 for entry in listed)
    margins = json.loads(metrics["vote_margins"])
    assert {cid for cid, margin in margins.items() if margin >= 0} == set(ids(8))
    assert metrics["clients_contaminated"] == 2
    assert metrics["subspace_rank"] == R
    assert metrics["gain"] > metrics["cost"] > 0
    assert "clair_warning" not in metrics
    table = np.array(json.loads(metrics["pair_distances"]))
    assert table.shape == (10, 10)
    assert (table[:8, :8] < 1).all()
    assert (table[:8, 8:] > 1).all()
    assert parameters is not None


def test_the_next_round_sends_the_same_weights_as_the_evaluation():
    strategy, found = make(), dict(zip(ids(7), models(6, 1), strict=True))
    _, shown, _, _, parameters = play(strategy, 1, found)
    asked, *_ = play(strategy, 2, found, parameters=parameters)
    for cid in ids(7):
        for a, b in zip(asked[cid], shown[cid], strict=True):
            np.testing.assert_array_equal(a, b)
    assert any((asked["0"][0] != asked["6"][0]).ravel())


def test_with_personalise_off_everybody_receives_the_global_model_as_one_object():
    strategy = make(personalise=False)
    *_, parameters = play(strategy, 1, dict(zip(ids(7), models(6, 1), strict=True)))
    for chosen in (strategy.configure_fit, strategy.configure_evaluate):
        assert all(ins.parameters is parameters for _, ins in chosen(2, parameters, manager(ids(7))))
    assert not strategy.memory


def test_means_are_weighted_by_examples_over_the_members():
    found = models(6, 1)
    sizes = {cid: 10 * (int(cid) + 1) for cid in ids(7)}
    _, _, global_model, _, _ = play(make(), 1, dict(zip(ids(7), found, strict=True)), sizes)
    shares = np.arange(1, 7) / 21
    for i in range(4):
        wanted = sum(share * np.float64(f[i]) for share, f in zip(shares, found[:6], strict=True))
        np.testing.assert_allclose(global_model[i], wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_clients_are_averaged_with_a_warning(count):
    found = dict(zip(ids(count), models(count, 0), strict=True))
    _, shown, global_model, metrics, _ = play(make(), 1, found)
    _, _, plain, _, _ = play(make(FedAvg), 1, found)
    for a, b in zip(global_model, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(shown["0"][0], global_model[0])
    assert "too few to vote" in metrics["clair_warning"]
    assert "contaminated_clients" not in metrics


def test_without_a_majority_the_round_is_fedavgs():
    found = dict(zip(ids(6), models(0, 6), strict=True))
    strategy = make()
    _, _, global_model, metrics, _ = play(strategy, 1, found)
    _, _, plain, _, _ = play(make(FedAvg), 1, found)
    for a, b in zip(global_model, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "no majority" in metrics["clair_warning"]
    assert metrics["clients_contaminated"] == 0
    assert strategy.records == {"margins": {}, "personal": []}


def test_a_model_without_a_matrix_is_averaged_with_a_warning():
    arrays = [np.arange(4.0), np.ones((1, 3))]
    strategy = CLAIR(initial_parameters=ndarrays_to_parameters(arrays), device="cpu")
    results = [result(cid, [a + int(cid) for a in arrays]) for cid in ids(4)]
    parameters, metrics = strategy.aggregate_fit(1, results, [])
    np.testing.assert_allclose(arrays_of(parameters)[0], arrays[0] + 1.5)
    assert "no matrix" in metrics["clair_warning"]


@pytest.mark.parametrize(
    ("matrices", "wanted"),
    [
        (None, {0: "layer.weight", 2: "head.weight"}),
        ("*.weight", {0: "layer.weight", 2: "head.weight"}),
        ("head.*", {2: "head.weight"}),
        (2, {2: "head.weight"}),
        (["head.weight", 0], {0: "layer.weight", 2: "head.weight"}),
    ],
)
def test_matrices_are_chosen_by_name_pattern_or_position(matrices, wanted):
    assert make(matrices=matrices).chosen(layer_map()) == wanted


@pytest.mark.parametrize("matrices", ["layer.bias", "*.nothing", 1, 99])
def test_a_matrix_that_is_not_there_is_named_with_those_that_are(matrices):
    strategy = make(matrices=matrices)
    with pytest.raises(ValueError, match=r"matrices=.* is no trainable 2-D tensor .*layer.weight \(0\)"):
        play(strategy, 1, dict(zip(ids(4), models(4, 0), strict=True)))


def test_tensors_that_were_not_chosen_are_averaged_and_not_voted_on():
    found = models(7, 0)
    found[6][2] = found[6][2] + 5  # off in the matrix that is not looked at
    _, shown, global_model, metrics, _ = play(make(matrices=0), 1, dict(zip(ids(7), found, strict=True)))
    assert metrics["clients_contaminated"] == 0
    np.testing.assert_array_equal(shown["0"][2], global_model[2])
    assert (shown["0"][0] != global_model[0]).any()


def test_absent_clients_keep_their_vote_and_their_part_in_each_new_subspace():
    strategy = make()
    first = dict(zip(ids(10), models(8, 2), strict=True))
    _, before, _, _, parameters = play(strategy, 1, first)
    margins = dict(strategy.records["margins"])
    second = {cid: first[cid] for cid in ids(8) if cid != "0"}  # 0 and the contaminated 8 and 9 are away
    _, _, global_model, _, parameters = play(strategy, 2, second, parameters=parameters)
    assert strategy.records["margins"]["0"] == margins["0"]
    assert strategy.records["margins"]["9"] == margins["9"] < 0
    everybody = strategy.configure_evaluate(2, parameters, manager([*ids(10), "new"]))
    shown = {client.cid: arrays_of(ins.parameters) for client, ins in everybody}
    for cid in ("8", "9", "new"):
        np.testing.assert_array_equal(shown[cid][0], global_model[0])
    own = np.float64(shown["0"][0]) - global_model[0]
    basis = strategy.memory["basis/layer.weight"].numpy()
    old = np.float64(before["0"][0]) - np.mean([np.float64(first[c][0]) for c in ids(8)], axis=0)
    np.testing.assert_allclose(own, old @ basis @ basis.T, atol=2e-6)  # what it was, projected on the new subspace
    assert np.linalg.norm(own - old) > 1e-3  # which is another


def test_a_client_voted_out_later_loses_its_own_part():
    strategy, found = make(), models(8, 1)
    clients = dict(zip(ids(8), found, strict=False))
    *_, parameters = play(strategy, 1, clients)
    assert "3" in strategy.records["personal"]
    clients["3"] = found[8]
    _, shown, global_model, metrics, _ = play(strategy, 2, clients, parameters=parameters)
    assert [entry["client"] for entry in json.loads(metrics["contaminated_clients"])] == ["3"]
    assert "3" not in strategy.records["personal"]
    np.testing.assert_array_equal(shown["3"][0], global_model[0])


def test_contaminated_clients_can_be_left_out_of_training_but_are_evaluated():
    strategy = make(contaminated="leave_out")
    clients = dict(zip(ids(10), models(8, 2), strict=True))
    *_, parameters = play(strategy, 1, clients)
    asked = strategy.configure_fit(2, parameters, manager(ids(10)))
    assert [client.cid for client, _ in asked] == ids(8)
    assert len(strategy.configure_evaluate(1, parameters, manager(ids(10)))) == 10
    results = [result(cid, clients[cid]) for cid in ids(8)]
    _, metrics = strategy.aggregate_fit(2, results, [])
    assert metrics["clients_sampled"] == 8
    assert metrics["clients_left_out"] == 2


def test_a_client_contaminated_in_one_matrix_of_two_is_judged_by_the_sum():
    found = models(9, 0)
    found[8][0] = models(0, 9, seed=4)[8][0]
    clients = dict(zip(ids(9), found, strict=True))
    # It agrees with everybody in one of two matrices: half of its votes at least, the bare majority.
    _, _, _, metrics, _ = play(make(refit=False, rank=R), 1, clients)
    assert json.loads(metrics["vote_margins"])["8"] >= 0
    assert metrics["clients_contaminated"] == 0
    # Alone with what it has in the other, it is barred where the subspace is fitted to members.
    for options in ({}, {"matrices": 0}):
        _, _, _, metrics, _ = play(make(**options), 1, clients)
        assert [entry["client"] for entry in json.loads(metrics["contaminated_clients"])] == ["8"]


def test_what_all_share_makes_no_difference():
    found = models(8, 2, dtype=np.float64)
    shift = [1e6 * np.random.default_rng(9).normal(size=shape) for shape in SHAPES[:4]]
    moved = [[a + s for a, s in zip(f[:4], shift, strict=True)] + [f[4]] for f in found]
    origin = [a + s for a, s in zip(start(np.float64)[:4], shift, strict=True)] + [start()[4]]
    near, far = (
        play(make(initial_parameters=ndarrays_to_parameters(o)), 1, dict(zip(ids(10), f, strict=True)))
        for o, f in ((start(np.float64), found), (origin, moved))
    )
    for cid in ids(10):
        np.testing.assert_allclose(far[1][cid][0] - shift[0], near[1][cid][0], atol=1e-8)
    assert far[3]["contaminated_clients"] == near[3]["contaminated_clients"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_weights_keep_their_dtype(dtype):
    clients = dict(zip(ids(7), models(6, 1, dtype=dtype), strict=True))
    _, shown, global_model, metrics, _ = play(make(initial_parameters=ndarrays_to_parameters(start(dtype))), 1, clients)
    assert metrics["clients_contaminated"] == 1
    for arrays in (*shown.values(), global_model):
        assert [a.dtype for a in arrays] == [*[np.dtype(dtype)] * 4, np.dtype(np.int64)]
        assert [a.shape for a in arrays] == list(SHAPES)


def test_a_resumed_run_sends_the_same_weights_bit_for_bit():
    first, found = make(), dict(zip(ids(8), models(7, 1), strict=True))
    *_, parameters = play(first, 1, found)
    state = json.loads(json.dumps({k: v for k, v in first.state_dict().items() if k != "memory"}))
    second = make(initial_parameters=parameters)
    second.load_state_dict({**state, "memory": first.state_dict()["memory"]})
    for strategy in (first, second):
        strategy.sent = {
            client.cid: arrays_of(ins.parameters)
            for client, ins in strategy.configure_fit(2, parameters, manager(ids(8)))
        }
    for cid in ids(8):
        for a, b in zip(first.sent[cid], second.sent[cid], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_state_of_other_matrices_is_refused():
    strategy = make()
    play(strategy, 1, dict(zip(ids(8), models(7, 1), strict=True)))
    with pytest.raises(ValueError, match=r"matrices head.weight, layer.weight.*matrices= that were saved"):
        make(matrices=0).load_state_dict(strategy.state_dict())


def test_a_round_that_memory_cannot_hold_fails_with_what_to_do(monkeypatch):
    monkeypatch.setattr(lowrank, "available_memory", lambda device: 100)
    _, _, global_model, metrics, _ = play(make(), 1, dict(zip(ids(8), models(7, 1), strict=True)))
    assert metrics["failed_round"]
    assert "form='clients'" in metrics["failed_reason"]
    for a, b in zip(global_model, start(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_sparse_graph_of_pairs_finds_them_too():
    clients = dict(zip(ids(40), models(32, 8), strict=True))
    _, _, _, metrics, _ = play(make(pair_degree=10), 1, clients)
    listed = json.loads(metrics["contaminated_clients"])
    assert {entry["client"] for entry in listed} == set(ids(40)[32:])
    assert all(entry["comparisons"] == 2 * 10 for entry in listed)


def test_if_all_that_are_drawn_were_voted_out_they_train_all_the_same():
    strategy = make(contaminated="leave_out")
    *_, parameters = play(strategy, 1, dict(zip(ids(8), models(7, 1), strict=True)))
    assert [client.cid for client, _ in strategy.configure_fit(2, parameters, manager(["7"]))] == ["7"]


@pytest.mark.parametrize("damage", ["long", "skew", "margin"])
def test_a_state_of_impossible_numbers_is_refused(damage):
    strategy = make()
    play(strategy, 1, dict(zip(ids(8), models(7, 1), strict=True)))
    state = strategy.state_dict()
    if damage == "margin":
        state["records"]["margins"]["0"] = 7.0
    else:
        key = "personal/layer.weight" if damage == "long" else "basis/layer.weight"
        state["memory"][key] = state["memory"][key] * (1e300 if damage == "long" else 2.0)
    with pytest.raises(ValueError, match="the state's"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("matrices", []), ("matrices", -1), ("matrices", 1.5), ("rank", -1), ("rank", 1.5), ("noise", 0),
        ("noise", "a"), ("noise", 1e200), ("refit", 1), ("form", "rings"), ("pair_degree", 3), ("pair_degree", 0),
        ("personalise", None), ("contaminated", "drop"), ("tolerance", 0), ("max_iterations", 0),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=f"^{option}="):
        make(**{option: value})


# ---- Local and OracleFedAvg ------------------------------------------------------------------------------------------


def test_local_gives_each_client_its_own_model_back():
    strategy, found = make(Local), models(4, 1)
    clients = dict(zip(ids(5), found, strict=True))
    _, shown, global_model, _, parameters = play(strategy, 1, clients)
    for cid in ids(5):
        for i in range(3):
            np.testing.assert_array_equal(shown[cid][i], found[int(cid)][i])
        for i in (3, 4):  # a running mean and a counter
            np.testing.assert_array_equal(shown[cid][i], global_model[i])
    second = {"0": found[4]}
    _, shown, _, _, parameters = play(strategy, 2, second, parameters=parameters)
    people = strategy.configure_evaluate(2, parameters, manager([*ids(5), "new"]))
    shown = {client.cid: arrays_of(ins.parameters) for client, ins in people}
    np.testing.assert_array_equal(shown["0"][0], found[4][0])
    np.testing.assert_array_equal(shown["1"][0], found[1][0])
    np.testing.assert_array_equal(shown["new"][0], parameters_to_ndarrays(parameters)[0])


def test_oracle_fedavg_is_fedavg_without_the_contaminated():
    found = models(4, 2)
    _, _, told, _, _ = play(make(OracleFedAvg, contaminated=[4, "5"]), 1, dict(zip(ids(6), found, strict=True)))
    _, _, plain, _, _ = play(make(FedAvg), 1, dict(zip(ids(4), found[:4], strict=True)))
    for a, b in zip(told, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_oracle_fedavg_knows_simulated_clients_by_their_partition():
    strategy = make(OracleFedAvg, contaminated=[1], partition_order=lambda new: {c.cid: int(c.cid) - 100 for c in new})
    found = models(2, 0)
    _, _, told, _, _ = play(strategy, 1, {"100": found[0], "101": found[1]})
    np.testing.assert_allclose(told[0], found[0][0], rtol=1e-6)


def test_a_round_without_a_benign_client_fails():
    _, _, _, metrics, _ = play(make(OracleFedAvg, contaminated=[0, 1]), 1, dict(zip(ids(2), models(2, 0), strict=True)))
    assert metrics["failed_round"]
    assert "no benign client" in metrics["failed_reason"]


@pytest.mark.parametrize("contaminated", ["3", 3, [1.5], None])
def test_the_oracle_wants_a_list(contaminated):
    with pytest.raises(ValueError, match=r"^contaminated="):
        make(OracleFedAvg, contaminated=contaminated)
