"""Which clients a round gets, and how their evaluations are averaged."""

import pytest
from flwr.common import Code, EvaluateRes, GetPropertiesRes, Status

from strategies import CRAFT, FedAvg, NotEnoughClients, partition_order

from .helpers import Proxy, initial, manager


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


def test_two_connected_clients_never_share_a_partition(caplog):
    def order(new):
        return {c.cid: 0 for c in new}

    def identities(s, cids):
        return {p.cid: s.sampler.identity(p.cid) for p, _ in s.configure_fit(1, initial(), manager(cids))}

    s = FedAvg(partition_order=order, min_available_clients=1, min_fit_clients=1)
    assert identities(s, ["7"]) == {"7": "partition 0"}
    with caplog.at_level("WARNING"):
        assert identities(s, ["6", "7", "8"]) == {"6": "6", "7": "partition 0", "8": "8"}
    assert "client 6 says that it is partition 0, as client 7 does" in caplog.text
    # Once the first has left, as where it was started again without a key of its own, another one follows.
    assert identities(s, ["8"]) == {"8": "partition 0"}
