"""Partitions: disjoint, complete, reproducible, large enough, and always finished."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from client_apps.data.partition import partition
from client_apps.errors import ConfigError

KINDS = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 0.1, "min_samples": 5},
    {"kind": "dirichlet", "alpha": 1, "min_samples": 5, "self_balancing": True},
    {"kind": "shards", "shards_per_client": 2},
    {"kind": "shards", "shards_per_client": 3},
    {"kind": "natural"},
]


def labels_and_owners(count: int = 1003, owners: int = 20) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    writers = np.array([f"w{i:02d}" for i in range(owners)])
    # Every owner has a sample; the others are spread at random.
    who = np.concatenate([np.arange(owners), rng.integers(0, owners, count - owners)])
    return rng.integers(0, 10, count), writers[who]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_partitions_are_disjoint_complete_and_not_empty(options: dict) -> None:
    labels, owners = labels_and_owners()
    parts = partition(labels, owners, num_clients=20, seed=3, **options)
    assert len(parts) == 20
    assert min(map(len, parts)) >= options.get("min_samples", 1)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_seed_reproduces_its_partition(options: dict) -> None:
    labels, owners = labels_and_owners()
    first = partition(labels, owners, num_clients=20, seed=3, **options)
    np.random.default_rng().random(3)
    again = partition(labels, owners, num_clients=20, seed=3, **options)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    if options["kind"] != "natural":
        different = partition(labels, owners, num_clients=20, seed=4, **options)
        assert any(not np.array_equal(one, other) for one, other in zip(first, different, strict=True))


def test_iid_sizes_differ_by_at_most_one_and_ignore_the_order_of_the_data() -> None:
    labels = np.repeat(np.arange(10), 103)
    parts = partition(labels, None, num_clients=20, seed=0, kind="iid")
    assert {len(part) for part in parts} == {51, 52}
    assert all(len(np.unique(labels[part])) >= 8 for part in parts)


def test_shards_give_each_client_few_labels() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 103))
    parts = partition(labels, None, num_clients=20, seed=0, kind="shards", shards_per_client=1)
    # A run of 51 samples among classes of 103 touches at most two of them, and samples over go to holders.
    assert max(len(np.unique(labels[part])) for part in parts) <= 2


def test_natural_takes_the_first_owners_in_sorted_order() -> None:
    labels, owners = labels_and_owners()
    parts = partition(labels, owners, num_clients=3, seed=0, kind="natural")
    for part, writer in zip(parts, ["w00", "w01", "w02"], strict=True):
        np.testing.assert_array_equal(part, np.flatnonzero(owners == writer))


def test_authors_protocol_finishes_where_redrawing_would_not(caplog: pytest.LogCaptureFixture) -> None:
    labels = np.repeat(np.arange(10), 6000)
    with caplog.at_level(logging.INFO):
        parts = partition(labels, None, num_clients=1000, seed=0, kind="dirichlet", alpha=0.1, min_samples=20)
    assert min(map(len, parts)) == 20
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(60000))
    assert "every client has at least 20" in caplog.text


def test_the_tightest_feasible_minimum_is_met() -> None:
    labels = np.repeat(np.arange(10), 10)
    parts = partition(labels, None, num_clients=10, seed=0, kind="dirichlet", alpha=0.05, min_samples=10)
    assert [len(part) for part in parts] == [10] * 10


@pytest.mark.parametrize("seed", range(5))
def test_self_balancing_with_few_classes_per_client_loses_nothing(seed: int) -> None:
    labels = np.repeat(np.arange(10), 30)
    options = {"kind": "dirichlet", "alpha": 1e-3, "self_balancing": True}
    parts = partition(labels, None, num_clients=10, seed=seed, **options)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(300))


def test_vanishing_proportions_are_refused() -> None:
    # Almost all proportions are exactly 0 here, and self-balancing divides 0 by 0.
    labels = np.repeat(np.arange(10), 30)
    options = {"kind": "dirichlet", "alpha": 1e-300, "self_balancing": True}
    with pytest.raises(ConfigError, match=r"alpha=1e-300; raise dataset.partition.alpha"):
        partition(labels, None, num_clients=10, seed=0, **options)


@pytest.mark.parametrize(
    ("options", "num_clients", "message"),
    [
        ({"kind": "dirichlet", "min_samples": 51}, 20, r"1020 of the 1003 .* lower num_clients or .*min_samples"),
        ({"kind": "iid"}, 1004, r"1004 is more than the 1003 samples"),
        ({"kind": "shards", "shards_per_client": 51}, 20, r"need 1020 samples"),
        ({"kind": "natural"}, 21, r"21 is more than the 20 natural clients"),
        ({"kind": "pathological"}, 20, r"kind must be one of iid, dirichlet, shards, natural"),
        ({"kind": "dirichlet", "beta": 1}, 20, r"partition.beta is not a known key; the known ones are: kind, alpha"),
        ({"kind": "dirichlet", "alpha": 0}, 20, r"alpha must be a number above 0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, 20, r"alpha must be a number above 0"),
        ({"kind": "dirichlet", "min_samples": 0}, 20, r"min_samples must be an integer of at least 1"),
        ({"kind": "dirichlet", "self_balancing": "no"}, 20, r"self_balancing must be true or false"),
        ({"kind": "iid"}, 0, r"num_clients must be an integer of at least 1"),
        ({}, 20, r"partition.kind is missing"),
    ],
    ids=str,
)
def test_impossible_partitions_are_refused(options: dict, num_clients: int, message: str) -> None:
    labels, owners = labels_and_owners()
    with pytest.raises(ConfigError, match=message):
        partition(labels, owners, num_clients=num_clients, seed=0, **options)


def test_natural_needs_owners() -> None:
    with pytest.raises(ConfigError, match="natural clients, and this one has none"):
        partition(np.arange(10), None, num_clients=2, seed=0, kind="natural")


def test_partitioning_writes_nothing_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    labels, owners = labels_and_owners()
    for options in KINDS:
        partition(labels, owners, num_clients=20, seed=0, **options)
    assert capfd.readouterr() == ("", "")
