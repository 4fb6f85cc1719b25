"""The benchmarks run, and compare like with like."""

import csv
import inspect
import itertools
import math

import numpy as np
import pytest
from PIL import Image

import strategies
from experiments.benchmarks import aggregation, field
from strategies import FedAvg, FedAvgM, FedFV, SpanStrategy, UpdateStrategy


def test_a_small_run_prints_and_saves_every_strategy_and_what_was_skipped(tmp_path, capsys):
    aggregation.main(
        ["--models", "mlp-small", "--clients", "3", "5000", "--repeats", "1", "--max-gb", ".1", "--out", str(tmp_path)]
    )
    with (tmp_path / "aggregation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(aggregation.FIELDS)
    measured = [r for r in rows if r["section"] == "aggregate" and r["m"] == "3" and r["device"] == "cpu"]
    assert [r["who"] for r in measured] == [aggregation.FLOWER, aggregation.FLOOR, *aggregation.SCALING]
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


@pytest.fixture(scope="module")
def field_run(tmp_path_factory):
    """Every strategy in a small round, and a round too large to measure."""
    out = tmp_path_factory.mktemp("field")
    field.main(["--rounds", "mlp-small:6", "mlp:5000", "--repeats", "1", "--max-gb", ".1", "--out", str(out)])
    with (out / "field.csv").open() as file:
        return out, list(csv.DictReader(file))


def test_the_field_has_every_strategy_with_finite_figures(field_run):
    out, rows = field_run
    assert tuple(rows[0]) == field.FIELDS
    measured = [row for row in rows if row["model"] == "mlp-small"]
    assert [row["who"] for row in measured] == list(field.STRATEGIES)
    for row in measured:
        assert (row["section"], row["d"], row["m"], row["skipped"]) == ("field", "10062", "6", "")
        assert all(float(row[key]) > 0 for key in ("seconds", "ratio", "memory_ratio", "repeats")), row
        assert all(math.isfinite(float(row[key])) for key in ("seconds", "ratio", "memory_ratio")), row
        assert all(float(row[key]) >= 0 for key in ("extra_mb", "kept_mb", "of_updates")), row
    with Image.open(out / "field.png") as image:
        assert image.width > 600


def test_fedavg_is_what_the_field_is_compared_with(field_run):
    (base,) = [row for row in field_run[1] if row["who"] == field.BASE]
    assert (float(base["ratio"]), float(base["memory_ratio"]), float(base["kept_mb"])) == (1, 1, 0)


def test_a_round_of_the_field_that_is_too_large_says_so(field_run):
    (skipped,) = [row for row in field_run[1] if row["skipped"]]
    assert (skipped["model"], skipped["m"], skipped["seconds"]) == ("mlp", "5000", "")
    assert "4.2 GB exceed 0.1 GB" in skipped["skipped"]


def test_a_strategy_that_fails_is_a_row_of_the_field_with_the_reason(monkeypatch):
    monkeypatch.setattr(field, "STRATEGIES", {"FedAvg": FedAvg})
    monkeypatch.setattr(field, "measure", _fails)
    (row,) = field.run([("mlp-small", 4)], repeats=1)
    assert (row["who"], row["skipped"]) == ("FedAvg", "failed: round 2 cannot be measured")
    assert len(field.tables([row])) == 1
    field.figure_of([row])


def _fails(*_):
    raise RuntimeError("round 2 cannot be measured")


def test_the_field_lacks_none_of_the_suite():
    bases = {UpdateStrategy, SpanStrategy}
    suite = {x for x in vars(strategies).values() if inspect.isclass(x) and issubclass(x, UpdateStrategy)} - bases
    layers, start, _ = aggregation.make_round("mlp-small", 1)
    made = [make(layers=layers, initial_parameters=start) for make in field.STRATEGIES.values()]
    assert {type(strategy) for strategy in made} == suite


def test_what_is_measured_is_a_round_with_half_of_the_clients_new():
    m = 4
    layers, start, results = aggregation.make_round("mlp-small", m + m // 2)
    rounds = field.Rounds(FedFV(layers=layers, initial_parameters=start, device="cpu"), results, m)
    seen = []
    for _ in range(3):
        rounds()
        seen.append({cid for cid, _ in rounds.strategy.records["past"]})
    assert [len(now) for now in seen] == [m] * 3
    assert [len(now - then) for then, now in itertools.pairwise(seen)] == [m // 2] * 2


def test_what_a_strategy_keeps_is_counted_in_bytes():
    layers, start, results = aggregation.make_round("mlp-small", 6)
    given = {"layers": layers, "initial_parameters": start, "device": "cpu"}
    kept = {}
    for make in (FedAvg, FedAvgM, FedFV):
        strategy = make(**given)
        field.Rounds(strategy, results, 4)()
        kept[make] = field.kept_bytes(strategy)
    assert kept[FedAvg] == 0
    assert kept[FedAvgM] == 8 * layers.size  # a float64 velocity
    assert 0 <= kept[FedFV] - 4 * 4 * layers.size < 200  # four clients' float32 updates, and their ids


def test_a_round_that_fails_is_not_measured():
    layers, start, results = aggregation.make_round("mlp-small", 3)
    results[0][1].num_examples = 0
    with pytest.raises(RuntimeError, match="round 1 of FedAvg cannot be measured"):
        field.Rounds(FedAvg(layers=layers, initial_parameters=start), results, 2)()


@pytest.mark.parametrize("who", ["FedAvg", "FedAdam"])
def test_a_strategy_too_slow_for_the_budget_is_measured_once(who):
    row = field.measure(who, "mlp-small", 4, repeats=50, budget=0.0)
    assert row["repeats"] == 1
    assert row["ratio"] == 1 if who == field.BASE else row["ratio"] > 0


@pytest.mark.parametrize("text", ["mlp", "mlp:1", "vit:10", "mlp:ten"])
def test_a_round_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        field.main(["--rounds", text])
    assert "is not MODEL:M" in capsys.readouterr().err
