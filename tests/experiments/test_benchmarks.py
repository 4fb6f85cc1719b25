"""The benchmarks run, and compare like with like."""

import numpy as np
import pytest

from experiments.benchmarks import aggregation
from strategies import FedAvg


def test_sections_name_who_is_compared():
    rows = aggregation.aggregate_time("mlp", 3, 1, "cpu")
    assert [r["who"] for r in rows] == ["Flower FedAvg", "one read of the updates", *aggregation.STRATEGIES]
    assert rows[0]["ratio"] == 1
    assert all(r["seconds"] > 0 for r in rows)
    rows = aggregation.solve_against_pinv(3, 1, "cpu")
    assert len(rows) == 3
    assert "20 layers, m=3, d=269722" in rows[0]["what"]


def test_both_sides_aggregate_the_same_round():
    layers, start, results = aggregation.make_round("mlp", 3)
    ours = FedAvg(layers=layers, initial_parameters=start).aggregate_fit(1, results, [])[0]
    theirs = aggregation.flower_fedavg().aggregate_fit(1, results, [])[0]
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        np.testing.assert_allclose(np.frombuffer(a[128:], "f4"), np.frombuffer(b[128:], "f4"), rtol=1e-5, atol=1e-7)


def test_one_read_of_the_updates_reads_all_of_them():
    _, _, results = aggregation.make_round("mlp", 2)
    assert aggregation.read_all(results) > 0
    with pytest.raises(ValueError, match="only as a result"):
        results[0][0].fit(None, None, None)
