"""The engine and growth benchmarks: cells measure what they say, fits find known exponents, files are written."""

import csv

import pytest

from experiments.benchmarks import cells, engines, growth

pytestmark = pytest.mark.ray


def test_an_overhead_cell_runs_a_round_of_all_clients():
    found = cells.cell(
        "experiments.benchmarks.engines", "overhead", engine="ray", api="legacy", clients=6, size=10, rounds=1
    )  # fmt: skip
    assert "note" not in found, found
    assert found["rounds"] == 1
    assert found["ms_per_client"] == pytest.approx(1e3 * found["seconds"] / 6)
    assert found["own_mb"] > 0


def test_the_plain_loop_holds_every_reply():
    found = cells.cell(
        "experiments.benchmarks.engines", "overhead", engine="loop", api="", clients=120, size=250_000, rounds=2
    )
    assert found["own_mb"] >= 60  # 120 MB of replies, less what was resident before


@pytest.mark.parametrize("engine", ["loop2", "serial"])
def test_a_training_cell_trains_whole_rounds(engine):
    found = cells.cell(
        "experiments.benchmarks.engines", "training", engine=engine, workload="digits", per_round=10, rounds=2,
        data_dir=".",
    )  # fmt: skip
    assert "note" not in found, found
    assert found["rounds"] == 2
    assert found["clients_per_s"] == pytest.approx(10 / found["seconds"])


def test_a_growth_cell_measures_each_cost():
    found = cells.cell(
        "experiments.benchmarks.growth", "measure", registered=8, cohort=4, parameters=400, layers=4, rounds=1
    )  # fmt: skip
    assert "note" not in found, found
    assert all(found[cost] > 0 for cost in growth.COSTS)


def test_a_cell_that_fails_says_why():
    found = cells.cell("experiments.benchmarks.growth", "measure", registered=2, cohort=4, parameters=4, layers=0)
    assert set(found) == {"note"}
    assert "ZeroDivisionError" in found["note"]


def row(section, what, engine, seconds):
    rest = {"own_mb": 1.0, "shared_mb": 2.0, "all_mb": 3.0, "rounds": 3}
    return {"section": section, "what": what, "engine": engine, "seconds": seconds, "ms_per_client": 10 * seconds,
            "clients_per_s": 100 / seconds, **rest}  # fmt: skip


def test_ratios_are_to_flowers_same_api(tmp_path):
    rows = [
        row("overhead", "a", "stock message", 30.0), row("overhead", "a", "stock legacy", 60.0),
        row("overhead", "a", "ray message", 2.0), row("overhead", "a", "ray legacy", 2.0),
        {"section": "overhead", "what": "b", "engine": "ray", "note": "failed"},
        row("training", "W1", "stock", 10.0), row("training", "W1", "ray", 0.5),
    ]  # fmt: skip
    engines.add_ratios(rows)
    overhead, training = engines.tables(rows)
    assert list(overhead.columns[4].cells) == ["1.0", "1.0", "15.0", "30.0", ""]
    assert list(training.columns[4].cells) == ["1.0", "20.0"]
    engines.save(rows, tmp_path)
    with (tmp_path / "engines.csv").open() as file:
        assert [r["engine"] for r in csv.DictReader(file)] == [r["engine"] for r in rows]
    assert (tmp_path / "engines.png").read_bytes().startswith(b"\x89PNG")


def test_fits_find_the_exponent_of_the_upper_half(tmp_path):
    rows = [{"series": "cohort", "value": m, "exchange": 0.5 + 1e-9 * m, "aggregate": 2e-6 * m**2, "rest": 0.0}
            for m in (10, 30, 100, 300, 1000)]  # fmt: skip
    a, b = growth.fit(rows, "cohort", "aggregate")
    assert (a, b) == (pytest.approx(2e-6), pytest.approx(2.0))
    assert growth.fit(rows, "cohort", "exchange")[1] == pytest.approx(0, abs=1e-6)
    assert growth.fit(rows, "cohort", "rest") is None
    growth.save(rows, tmp_path)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert list(growth.table(rows)[0].columns[2].cells)[-1] == "2.00"
