"""The comparison of CRAFT with every baseline: resuming a sweep, choosing points, and the table it ends in."""

import csv
import json
import logging
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from client_apps.errors import ConfigError
from experiments.config import compose
from experiments.resume import claimed
from experiments.tracking import RunTracker
from experiments.tuning import choose
from strategies import RoundsFailed

from .cli import run

SMALL = (
    "benchmark=femnist_mlp", "dataset=digits", "num_clients=12", "clients_per_round=6", "num_rounds=2",
    "evaluation.every=1", "tracking.progress=false", "tracking.tensorboard=false",
)  # fmt: skip


def table(folder):
    with (folder / "report.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def cfg(tmp_path):
    overrides = ["experiment=craft_table", *SMALL, "hparams.point=0", f"output_dir={tmp_path / 'craft/seed0'}"]
    return compose(overrides)


def leave_run(cfg, rounds=2, error=None, accuracy=0.5):
    """Leave what a run with this configuration would, without the run."""
    with ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(type(error)))
        tracker = RunTracker(
            Path(cfg["output_dir"]), config=cfg, num_rounds=cfg["num_rounds"], tensorboard=False, progress=False
        )
        with tracker:
            for number in range(rounds + 1):
                tracker.log_round({"round": number, "accuracy": accuracy})
            if error is not None:
                raise error


def test_an_empty_folder_is_free(cfg, tmp_path):
    with claimed(cfg) as reason:
        assert reason is None
    (tmp_path / "craft/seed0").mkdir()
    (tmp_path / "craft/seed0/run.log").write_text("refused\n")  # what a run leaves that was refused
    with claimed(cfg) as reason:
        assert reason is None
    assert not list(tmp_path.rglob("*.aside*"))


def test_a_finished_run_is_skipped_wherever_and_however_it_ran(cfg, tmp_path):
    leave_run(cfg)
    elsewhere = {
        "data_dir": "other", "simulation": {"engine": "ray"}, "tracking": {"progress": True}, "skip_finished": False,
        "client": {**cfg["client"], "device": "cuda"}, "strategy": {**cfg["strategy"], "device": "cpu"},
    }  # fmt: skip
    for same in (cfg, cfg | elsewhere, cfg | {"unset": None}):
        with claimed(same) as reason:
            assert reason == "it has finished"
    assert sorted(path.name for path in (tmp_path / "craft").iterdir()) == [".seed0.lock", "seed0"]


@pytest.mark.parametrize("change", [{"num_rounds": 3}, {"seed": 1}, {"benchmark_name": "another"}])
def test_a_finished_run_of_another_configuration_is_refused_and_left_alone(cfg, change, tmp_path):
    leave_run(cfg)
    before = {path: path.read_bytes() for path in (tmp_path / "craft/seed0").iterdir()}
    with (
        pytest.raises(ConfigError, match=f"finished run with {next(iter(change))}=.*move it away"),
        claimed(cfg | change),
    ):
        pass
    assert before == {path: path.read_bytes() for path in (tmp_path / "craft/seed0").iterdir()}


def test_a_run_that_diverged_is_not_tried_again_unless_changed(cfg, tmp_path):
    leave_run(cfg, error=RoundsFailed("5 rounds in a row failed", {}))
    with claimed(cfg) as reason:
        assert "would again (RoundsFailed: 5 rounds" in reason
    with claimed(cfg | {"num_rounds": 3}) as reason:
        assert reason is None
    assert (tmp_path / "craft/seed0.aside1/metrics.jsonl").exists()


@pytest.mark.parametrize("how", ["killed", "damaged", "failed", "short"])
def test_what_was_cut_short_is_moved_aside_and_nothing_is_lost(cfg, how, tmp_path):
    folder = tmp_path / "craft/seed0"
    for number in (1, 2):
        leave_run(cfg, rounds=1 if how == "short" else 2, error=OSError("disk full") if how == "failed" else None)
        if how == "killed":
            (folder / "status.json").unlink()
        elif how == "damaged":
            (folder / "status.json").write_text("{")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with claimed(cfg) as reason:
            assert reason is None
        assert not list(folder.iterdir())
        assert before == {path.name: path.read_bytes() for path in (tmp_path / f"craft/seed0.aside{number}").iterdir()}


def test_an_open_log_goes_on_in_the_new_folder(cfg, tmp_path):
    leave_run(cfg, error=OSError("disk full"))
    handler = logging.FileHandler(tmp_path / "craft/seed0/run.log")
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger().warning("the old run's")
        with claimed(cfg):
            pass
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert (tmp_path / "craft/seed0.aside1/run.log").read_text() == "the old run's\n"
    assert "disk full" in (tmp_path / "craft/seed0/run.log").read_text()


def test_a_run_that_another_process_is_at_is_skipped(cfg, tmp_path):
    with claimed(cfg) as first:
        leave_run(cfg)
        (tmp_path / "craft/seed0/status.json").unlink()  # as while it is running
        with claimed(cfg) as second:
            assert second == "another process is at work on it"
    assert first is None
    assert not list(tmp_path.rglob("*.aside*"))
    with claimed(cfg) as third:
        assert third is None  # killed


def test_a_folder_moved_aside_takes_no_run(cfg, tmp_path):
    with pytest.raises(ConfigError, match="moved aside"), claimed(cfg | {"output_dir": str(tmp_path / "seed0.aside1")}):
        pass


def leave_points(folder, strategy, accuracies):
    """Leave a run per point; None: it failed."""
    for point, accuracy in enumerate(accuracies):
        cfg = compose(
            ["experiment=craft_tune", *SMALL, f"strategy={strategy}", f"hparams.point={point}", "output_dir=x"]
        )
        cfg["output_dir"] = str(folder / strategy / f"point{point}_seed100")
        if accuracy is None:
            leave_run(cfg, error=RoundsFailed("NaN", {}))
        else:
            leave_run(cfg, accuracy=accuracy)


def test_the_best_point_is_chosen(tmp_path, capsys):
    leave_points(tmp_path, "craft", [0.1, 0.4, None, 0.6, 0.6, 0.2])
    leave_points(tmp_path, "fedavg", [None, 0.3])
    leave_points(tmp_path, "fedavgm", [None])
    assert choose(tmp_path, Console(width=120)) == tmp_path / "best.yaml"
    there = compose(["experiment=craft_tune", *SMALL, "hparams.point=3", "output_dir=x"])
    settings = {"strategy.server_lr": there["strategy"]["server_lr"], "client.lr": there["client"]["lr"]}
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == {
        "femnist_mlp": {
            "craft": {"point": 3, "accuracy": 0.6, "settings": settings},  # of equals the first
            "fedavg": {"point": 1, "accuracy": 0.3, "settings": {}},
        }
    }
    text = (tmp_path / "points.md").read_text()
    assert "| craft | 10.0 | 40.0 | failed | **60.0** | 60.0 | 20.0 |" in text
    assert "| fedavgm | failed | – |" in text
    assert "Points on femnist_mlp" in capsys.readouterr().out
    cfg = compose(["experiment=craft_table", *SMALL, f"tuned={tmp_path / 'best.yaml'}", "output_dir=x"])
    assert cfg["client"] | cfg["strategy"] == there["client"] | there["strategy"]


def test_a_point_that_failed_with_one_seed_loses(tmp_path):
    leave_points(tmp_path, "craft", [0.5, 0.9])
    cfg = compose(["experiment=craft_tune", *SMALL, "hparams.point=1", "seed=101", "output_dir=x"])
    leave_run(cfg | {"output_dir": str(tmp_path / "craft/point1_seed101")}, error=RoundsFailed("NaN", {}))
    choose(tmp_path, Console(quiet=True))
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["femnist_mlp"]["craft"]["point"] == 0


def test_a_point_that_lacks_a_seed_loses(tmp_path, capsys):
    for point, seed, accuracy in ((0, 100, 0.5), (0, 101, 0.6), (1, 100, 0.58)):
        overrides = ["experiment=craft_tune", *SMALL, f"hparams.point={point}", f"seed={seed}"]
        folder = tmp_path / f"craft/point{point}_seed{seed}"
        leave_run(compose([*overrides, f"output_dir={folder}"]), accuracy=accuracy)
    choose(tmp_path)
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["femnist_mlp"]["craft"]["point"] == 0
    assert "58.0 (1/2)" in (tmp_path / "points.md").read_text()


def test_a_finished_run_whose_records_are_damaged_is_run_again(cfg, tmp_path):
    leave_run(cfg)
    (tmp_path / "craft/seed0/metrics.jsonl").write_text('{"round": 0, "accu')
    with claimed(cfg) as reason:
        assert reason is None
    assert (tmp_path / "craft/seed0.aside1/metrics.jsonl").exists()


def test_without_points_there_is_no_best(tmp_path, cfg):
    leave_run(cfg)
    assert choose(tmp_path) is None
    assert not (tmp_path / "best.yaml").exists()


def test_tuning_and_the_table_by_command_line_and_once_more(tmp_path):
    tune = ("-m", "experiment=craft_tune", *SMALL, "strategy=craft,fedavg", "hparams.point=0,8")
    found = run(*tune, f"hydra.sweep.dir={tmp_path / 'tune'}")
    assert found.returncode == 0, found.stdout
    assert "Points on femnist_mlp" in found.stdout
    best = yaml.safe_load((tmp_path / "tune/best.yaml").read_text())["femnist_mlp"]
    assert set(best) == {"craft", "fedavg"}

    sweep = tmp_path / "table"
    words = (
        "-m", "experiment=craft_table", *SMALL, "strategy=craft,fedavg", "seed=0,1",
        f"tuned={tmp_path / 'tune/best.yaml'}", f"hydra.sweep.dir={sweep}",
    )  # fmt: skip
    found = run(*words)
    assert found.returncode == 0, found.stdout
    assert "Skipped" not in found.stdout
    first = table(sweep)
    assert {(row["strategy"], row["seeds"]) for row in first} == {("craft", "2"), ("fedavg", "2")}
    (other,) = [row for row in first if row["strategy"] == "fedavg"]
    assert (other["against"], other["pairs"]) == ("craft", "2")
    ran = yaml.safe_load((sweep / "craft/seed1/config.yaml").read_text())
    chosen = best["craft"]["settings"]
    assert (ran["client"]["lr"], ran["strategy"]["server_lr"]) == (chosen["client.lr"], chosen["strategy.server_lr"])

    # As after a crash: two cells were killed. One goes on from its checkpoint, one that has none begins anew; both give
    # the same, and the others stay as they are.
    for cell in ("fedavg/seed0", "fedavg/seed1"):
        (sweep / cell / "status.json").unlink()
    shutil.rmtree(sweep / "fedavg/seed1/checkpoints")
    kept = {path: path.stat().st_mtime_ns for path in sweep.glob("*/seed?/metrics.jsonl")}
    found = run(*words)
    assert found.returncode == 0, found.stdout
    assert found.stdout.count("Skipped") == 2
    assert "fedavg/seed1 (was killed, or is damaged) was moved to seed1.aside1" in " ".join(found.stdout.split())
    again = {path for path, time in kept.items() if path.stat().st_mtime_ns != time}
    assert again == {sweep / "fedavg/seed0/metrics.jsonl", sweep / "fedavg/seed1/metrics.jsonl"}
    for cell in ("fedavg/seed0", "fedavg/seed1"):
        assert json.loads((sweep / cell / "status.json").read_text())["status"] == "finished"
    assert not list(sweep.glob("fedavg/seed0.aside*"))
    assert (sweep / "fedavg/seed1.aside1/metrics.jsonl").exists()
    measured = {name for name in first[0] if not name.startswith("seconds")}
    assert [{n: row[n] for n in measured} for row in table(sweep)] == [{n: row[n] for n in measured} for row in first]


def test_a_cell_that_diverged_leaves_the_others_and_has_its_place_in_the_table(tmp_path):
    cell = ("experiment=craft_table", *SMALL, "seed=0", "hparams.point=0", "strategy.max_failed_rounds=1")
    there = compose([*cell, f"output_dir={tmp_path / 'craft/seed0'}"])
    leave_run(there)
    diverging = ("-m", *cell, "client.lr=1e30", f"hydra.sweep.dir={tmp_path}")
    found = run(*diverging, "strategy=craft,fedavg")
    assert found.returncode == 1
    words = " ".join(found.stdout.split())
    assert (
        f"holds a finished run with client.lr={there['client']['lr']}, not 1e+30" in words
    )  # refused, and not touched
    assert "RoundsFailed" in words
    assert "2 of the sweep's runs failed" in words
    found = run(*diverging, "strategy=fedavg")  # nothing left to do
    assert found.returncode == 0, found.stdout
    assert "it failed before and would again (RoundsFailed: 1 round" in found.stdout
    assert {(row["strategy"], row["seeds"], row["failed_seeds"]) for row in table(tmp_path)} == {
        ("craft", "1", "0"), ("fedavg", "0", "1"),
    }  # fmt: skip
