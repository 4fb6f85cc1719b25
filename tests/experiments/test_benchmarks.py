"""The benchmarks run, and compare like with like."""

import csv

import numpy as np
import pytest
from PIL import Image

from experiments.benchmarks import aggregation
from strategies import FedAvg


def test_a_small_run_prints_and_saves_every_strategy_and_what_was_skipped(tmp_path, capsys):
    aggregation.main(
        ["--models", "mlp-small", "--clients", "3", "5000", "--repeats", "1", "--max-gb", ".1", "--out", str(tmp_path)]
    )
    with (tmp_path / "aggregation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(aggregation.FIELDS)
    measured = [r for r in rows if r["section"] == "aggregate" and r["m"] == "3" and r["device"] == "cpu"]
    assert [r["who"] for r in measured] == [aggregation.FLOWER, aggregation.FLOOR, *aggregation.STRATEGIES]
    assert float(measured[0]["ratio"]) == 1
    assert all(float(r["seconds"]) > 0 for r in measured)
    assert all(float(r["extra_mb"]) >= 0 for r in measured if r["who"] != aggregation.FLOOR)
    (skipped,) = [r for r in rows if r["skipped"]]
    assert (skipped["m"], skipped["seconds"]) == ("5000", "")
    assert "0.2 GB exceed 0.1 GB" in skipped["skipped"]
    solves = [r for r in rows if r["section"] == "solve" and r["device"] == "cpu"]
    assert len(solves) == 3
    assert solves[0]["d"] == "269722"
    out = capsys.readouterr().out
    assert "skipped" in out
    assert len(out.splitlines()) < 40
    with Image.open(tmp_path / "aggregation.png") as image:
        assert image.width > 300


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


def test_a_budget_ends_the_repetitions_but_not_the_first():
    times = aggregation.alternate({"a": lambda: None, "b": lambda: None}, 50, budget=0.0)
    assert [len(seconds) for seconds in times.values()] == [1, 1]
