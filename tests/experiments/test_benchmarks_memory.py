"""The memory benchmark: a small run has every figure, its slope is right on known series, and a leak is found."""

import csv

import numpy as np
import pytest
import torch

from experiments.benchmarks import memory
from strategies import FedAvg


def in_this_process(module, function, /, **given):
    assert (module, function) == ("experiments.benchmarks.memory", "measure")
    return memory.measure(**given)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    """No process of its own for a case, a small model, and one thread for it."""
    monkeypatch.setattr(memory, "cell", in_this_process)
    monkeypatch.setattr(memory, "SHAPES", ((6, 5), (6,), (4, 6), (4,), (9, 8), (9,)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = {"rounds": 16, "clients": 2, "registered": 3, "progress": lambda _: None}


def test_a_small_run_measures_both_apis_and_flowers_strategy(tmp_path):
    cases = [("CRAFT", "serial", "legacy"), ("CRAFT", "serial", "message"), (memory.FLOWER, "serial", "message")]
    rows = memory.run(cases=cases, **SMALL)
    for row in rows:
        assert len(row["own_mb"]) == len(row["rss_mb"]) == 16, row
        assert all(0 < own <= rss for own, rss in zip(row["own_mb"], row["rss_mb"], strict=True))
        assert (row["first_mb"], row["settled_mb"], row["last_mb"]) == tuple(row["own_mb"][i] for i in (0, 4, 15))
        assert row["verdict"] in ("flat", "grows", "not told")
    table = memory.table([*rows, {**SMALL, "who": "x", "engine": "ray", "api": "legacy", "note": "failed: no memory"}])
    assert list(table.columns[0].cells) == ["CRAFT", "CRAFT", memory.FLOWER, "x"]
    assert list(table.columns[3].cells)[-1] == "failed: no memory"
    assert "16 rounds of 2 of 3 clients" in table.title
    memory.save(rows, tmp_path)
    with (tmp_path / "memory.csv").open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == memory.FIELDS
    assert [(r["who"], r["engine"], r["api"]) for r in read] == cases
    with (tmp_path / "memory_rounds.csv").open() as file:
        rounds = list(csv.DictReader(file))
    assert [r["round"] for r in rounds] == [str(n) for n in range(1, 17)] * 3
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("who", ["FedLF", "CLAIR", "Local"])
def test_those_that_remember_clients_can_be_measured(who):
    (row,) = memory.run(cases=[(who, "serial", "legacy")], **{**SMALL, "rounds": 14, "clients": 3})
    assert "slope_kb" in row


class Leaks(FedAvg):
    """Keeps 4 MB of each round."""

    kept: list[np.ndarray]

    def conclude(self, updates):
        self.kept = [*getattr(self, "kept", []), np.ones(500_000)]


def test_a_leak_is_found(monkeypatch):
    monkeypatch.setitem(memory.STRATEGIES, "leaks", Leaks)
    (row,) = memory.run(cases=[("leaks", "serial", "legacy")], **{**SMALL, "rounds": 40})
    assert row["verdict"] == "grows"
    assert row["slope_kb"] == pytest.approx(4000, rel=0.3)


def test_a_case_that_fails_says_why_and_the_rest_goes_on(monkeypatch):
    def failing(module, function, /, **given):
        return {"note": "failed: no room"} if given["who"] == "FedLF" else in_this_process(module, function, **given)

    monkeypatch.setattr(memory, "cell", failing)
    rows = memory.run(cases=[("FedLF", "serial", "legacy"), ("CRAFT", "serial", "legacy")], **SMALL)
    assert [("slope_kb" in row, row.get("note")) for row in rows] == [(False, "failed: no room"), (True, None)]
    assert len(memory.figure_of(rows).axes[0].lines) == 1


# ---- the slope -----------------------------------------------------------------------------------------------------


def test_a_straight_line_has_its_slope_and_no_error():
    found, error = memory.slope([3 + 0.25 * t for t in range(150)])
    assert found == pytest.approx(0.25)
    assert error == pytest.approx(0, abs=1e-9)


def test_a_sawtooth_and_pages_handed_back_now_and_then_are_flat():
    sawtooth = [t % 5 + 100.0 for t in range(150)]
    assert memory.slope(sawtooth) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    dips = np.full(150, 450.0)
    dips[[7, 33, 34, 90, 149]] = 400.0
    assert memory.slope(dips) == (0, 0)


def test_the_interval_covers_the_slope_as_often_as_it_says_though_readings_resemble_each_other():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        noise, series = 0.0, []
        for t in range(150):
            noise = 0.6 * noise + rng.normal()
            series.append(0.01 * t + noise)
        found, error = memory.slope(series)
        inside += abs(found - 0.01) <= error
    assert 0.9 <= inside / 300 <= 0.99


def test_what_is_left_over_is_cut_off_at_the_start():
    assert memory.slope([1e6, 1e6, *range(30)], blocks=3)[0] == pytest.approx(1)


@pytest.mark.parametrize(("values", "blocks"), [(range(9), 10), (range(9), 2)])
def test_too_few_values_are_refused(values, blocks):
    with pytest.raises(ValueError, match="at least three blocks of one are needed"):
        memory.slope(values, blocks)


@pytest.mark.parametrize(
    ("found", "error", "said"),
    [(1, 2, "flat"), (-700, 100, "flat"), (20, 5, "flat"), (50, 5, "grows"), (45, 9, "grows"), (0, 90, "not told")],
)
def test_a_thousandth_of_what_fifty_clients_send_is_flat(found, error, said):
    assert pytest.approx(967.416) == memory.MODEL_KB
    assert memory.verdict(found, error, 50) == said  # up to 48.4 kB
