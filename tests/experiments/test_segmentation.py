"""Whole runs of FedRef's experiment on FeTS2022: their records, FedRef's step, engines, reports, and bad folders."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from experiments.config import compose
from experiments.examples import FILE, load_examples
from experiments.report import report
from experiments.run import run
from tests.client_apps import fets

from . import cli

pytestmark = pytest.mark.ray

TINY = (
    "experiment=fedref_fets2022", "num_clients=3", "clients_per_round=3", "num_rounds=3", "dataset.patch=[16,16,16]",
    "dataset.patches_per_subject=2", "dataset.modalities=[flair,t1ce]", "model.channels=[4,8]", "model.num_res_units=1",
    "client.device=cpu", "strategy.device=cpu", "tracking.progress=false", "tracking.tensorboard=false",
)  # fmt: skip
FEDREF = ("strategy=fedref", "strategy.window=1")
EVALUATED = [0, 2, 3]  # evaluation.every=2, and the last round
TESTED = [0, 1]  # the third institution has a single subject, which it trains on
CLASSES = ("wt", "tc", "et")
SCORES = (
    "dice", "dice_std", "worst10", "best10", "dice_weighted", "clients_evaluated", "hd95",
    *(f"{name}_{part}" for name in ("dice", "hd95") for part in CLASSES),
)  # fmt: skip
STABILITY = ("forgetting", "updatable", "zeta", "share_fell", "total_variation", "udp_loss", "udp_norm", "straightness")
DIAGONAL = math.dist((0, 0, 0), fets.SHAPE)  # of a volume, in mm: the largest distance


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The server evaluates as clients do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir that no test changes: three institutions of two, two and one subjects."""
    folder = tmp_path_factory.mktemp("data")
    fets.write(folder, modalities=("flair", "t1ce"))
    return folder


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of `fedref` and `fedavg` in one process, evaluated on the server."""
    base = tmp_path_factory.mktemp("runs")
    for name, strategy in (("fedref", FEDREF), ("fedavg", ("strategy=fedavg",))):
        finish(data, base / name, *strategy, "simulation=serial")
    return base


def finish(data: Path, folder: Path, *overrides: str) -> None:
    run(compose([*TINY, *overrides, f"data_dir={data}", f"output_dir={folder}"]))


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The records of the rounds, without the times."""
    return [{k: v for k, v in r.items() if "seconds" not in k} for r in cli.rounds(folder)]


def clients(folder: Path, *, after: int = -1) -> dict[str, np.ndarray]:
    """The columns of clients.parquet after a round, in the order of rounds and clients."""
    table = pq.read_table(folder / "clients.parquet").sort_by([("round", "ascending"), ("client", "ascending")])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return {name: values[columns["round"] > after] for name, values in columns.items()}


# What a run leaves behind


@pytest.mark.parametrize("strategy", ["fedref", "fedavg"])
def test_a_run_records_dice_and_distances_of_every_class(runs: Path, strategy: str) -> None:
    records = recorded(runs / strategy)
    assert [r["round"] for r in records] == [0, 1, 2, 3]
    for r in records[1:]:
        assert (r["clients_accepted"], r["failed_round"]) == (3, False)
        assert 0 < r["train_loss"] < 3
    assert [r["round"] for r in records if "dice" in r] == EVALUATED
    for r in (records[number] for number in EVALUATED):
        assert r["clients_evaluated"] == len(TESTED)
        assert all(0 <= r[name] <= 1 for name in SCORES if name.startswith(("dice", "worst", "best")))
        assert all(0 <= r[name] <= DIAGONAL for name in SCORES if name.startswith("hd95"))
        # Each institution tests one subject, so that the mean over institutions is that over subjects.
        assert r["dice"] == pytest.approx(np.mean([r[f"dice_{part}"] for part in CLASSES]), abs=1e-9)
        assert r["hd95"] == pytest.approx(np.mean([r[f"hd95_{part}"] for part in CLASSES]), rel=1e-9)
    assert json.loads((runs / strategy / "status.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("strategy", ["fedref", "fedavg"])
def test_a_run_records_forgetting_and_stability_of_its_dice(runs: Path, strategy: str) -> None:
    records = recorded(runs / strategy)
    first, second, last = (records[number]["dice"] for number in EVALUATED)
    found = records[-1]
    assert set(STABILITY) <= found.keys()
    assert found["total_variation"] == pytest.approx(abs(second - first) + abs(last - second))
    assert found["forgetting"] == pytest.approx(max(first - last, 0) + max(second - last, 0))
    assert found["zeta"] == pytest.approx(first + second - 2 * last)
    losses = [r["train_loss"] for r in records[1:]]
    assert found["udp_loss"] == np.mean(np.diff(losses) > 0)
    assert found["path_length"] == pytest.approx(sum(r["step_norm"] for r in records[1:]))
    assert 0 < found["straightness"] <= 1


def test_clients_are_recorded_with_their_dice(runs: Path) -> None:
    table = clients(runs / "fedref")
    assert {"round", "client", "num_examples", "dice", "loss"} <= table.keys()
    assert list(zip(table["round"], table["client"], strict=True)) == [(n, c) for n in EVALUATED for c in TESTED]
    assert (table["num_examples"] == 1).all()
    for r in recorded(runs / "fedref"):
        if "dice" in r:
            assert table["dice"][table["round"] == r["round"]].mean() == pytest.approx(r["dice"], rel=1e-6, abs=1e-9)


def test_examples_are_the_slices_of_the_test_subjects(runs: Path) -> None:
    examples = load_examples(runs / "fedref" / FILE)
    assert sorted(e.client for e in examples) == TESTED
    for e in examples:
        stored = fets.arrays(int(e.subject[-5:]))
        assert e.modality == "flair"
        np.testing.assert_array_equal(e.image, stored["flair"][:, :, e.plane].T)
        np.testing.assert_array_equal(e.truth[0], stored["seg"][:, :, e.plane].T > 0)
        assert e.truth[0].any()


# FedRef


def test_fedref_takes_the_map_step_once_its_window_is_full(runs: Path) -> None:
    """With a window of one the reference is θ_r itself, so that the step is FedAvg's over 1 + η λ_ref = 1.1."""
    fedref, fedavg = recorded(runs / "fedref"), recorded(runs / "fedavg")
    assert [r["fine_tuned"] for r in fedref[1:]] == [0, 1, 1]
    assert [r["lambda_ref"] for r in fedref[1:]] == [0.1] * 3
    assert fedref[1]["step_norm"] == pytest.approx(fedavg[1]["step_norm"], rel=1e-6)
    assert fedref[2]["train_loss"] == pytest.approx(fedavg[2]["train_loss"], rel=1e-6)  # on the same model
    assert fedref[2]["step_norm"] == pytest.approx(fedavg[2]["step_norm"] / 1.1, rel=1e-5)
    ours, theirs = (load_file(runs / name / "model.safetensors") for name in ("fedref", "fedavg"))
    assert ours.keys() == theirs.keys()
    assert any(not np.array_equal(ours[name], theirs[name]) for name in ours)


# Ways to evaluate and to run


def test_clients_evaluate_as_the_server_does(data: Path, runs: Path, tmp_path: Path) -> None:
    finish(data, tmp_path, *FEDREF, "simulation=serial", "evaluation=federated")
    server, federated = recorded(runs / "fedref"), recorded(tmp_path)
    evaluated = [number for number in EVALUATED if number > 0]  # clients never see the untrained model
    assert [r["round"] for r in federated if "dice" in r] == evaluated
    for number in evaluated:
        one, other = server[number], next(r for r in federated if r["round"] == number)
        assert [one[name] for name in SCORES] == [other[name] for name in SCORES]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    ours, theirs = clients(runs / "fedref", after=0), clients(tmp_path)
    for column in ("round", "client", "num_examples", "dice"):
        np.testing.assert_array_equal(ours[column], theirs[column])
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
    assert (runs / "fedref" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert not (tmp_path / FILE).exists()


def test_ray_gives_the_same_bits(data: Path, runs: Path, tmp_path: Path) -> None:
    found = cli.run(
        *TINY, *FEDREF, "simulation=ray", "simulation.num_cpus=1", "simulation.object_store_mb=128",
        f"data_dir={data}", f"output_dir={tmp_path}", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    assert recorded(tmp_path) == recorded(runs / "fedref")
    assert (runs / "fedref" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


# Reports


def test_the_report_shows_classes_and_slices(runs: Path, tmp_path: Path) -> None:
    with (tmp_path / "terminal.txt").open("w", encoding="utf-8") as terminal:
        console = Console(file=terminal, width=120)
        path = report([runs], against="fedref", out=tmp_path / "report", console=console)
    assert path == tmp_path / "report" / "report.md"
    text = path.read_text(encoding="utf-8")
    assert "](segmentation.png)" in text
    assert (path.parent / "segmentation.png").read_bytes().startswith(b"\x89PNG")
    classes = "| strategy | Dice WT | Dice TC | Dice ET | HD95 WT | HD95 TC | HD95 ET | HD95 mean |"
    _, _, rest = text.partition(f"### Per class\n\n{classes}\n")
    lines = {words[1]: words[3::2] for words in (line.split() for line in rest.split("\n\n")[0].splitlines()[1:])}
    with (path.parent / "report.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert lines.keys() == rows.keys() == {"fedref", "fedavg"}
    for name, row in rows.items():
        last = recorded(runs / name)[-1]
        for measure in ("dice", "hd95", *STABILITY, *(f"{m}_{part}" for m in ("dice", "hd95") for part in CLASSES)):
            assert float(row[f"{measure}_seed_mean"]) == pytest.approx(last[measure], rel=1e-9, abs=1e-12)
        shown = [100 * last[f"dice_{part}"] for part in CLASSES]
        shown += [last[key] for key in ("hd95_wt", "hd95_tc", "hd95_et", "hd95")]
        assert [float(cell.strip("*")) for cell in lines[name]] == pytest.approx(shown, abs=0.051)


# Folders that cannot be used


def test_a_missing_modality_ends_the_command_in_one_sentence_before_training(tmp_path: Path) -> None:
    root = fets.write(tmp_path / "data", modalities=("flair", "t1ce"))
    file = root / "FeTS2022_00004" / "FeTS2022_00004_t1ce.nii.gz"
    file.unlink()
    found = cli.run(
        *TINY, "strategy=fedref", "simulation=serial", f"data_dir={tmp_path / 'data'}",
        f"output_dir={tmp_path / 'out'}",
    )  # fmt: skip
    assert found.returncode == 1
    sentence = (
        f"\nConfigError: {file.parent} has no {file.name}, the modality t1ce of FeTS2022_00004; put it there, leave "
        "the modality out of dataset.modalities or remove the subject from the partitioning CSV.\n"
    )
    assert found.stdout.endswith(sentence)
    assert "Traceback" not in found.stdout
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


# Real subjects


def test_a_round_on_real_subjects(data_dir: Path, tmp_path: Path) -> None:
    finish(
        data_dir / "fets2022_2mm", tmp_path, *FEDREF, "dataset.partitioning=partitioning_flair_t1ce.csv",
        "num_clients=5", "clients_per_round=5", "num_rounds=1", "dataset.patch=[32,32,32]",
        "dataset.patches_per_subject=1", "simulation=serial",
    )  # fmt: skip
    start, end = recorded(tmp_path)
    assert (end["clients_accepted"], end["clients_evaluated"]) == (5, 4)  # the fifth has one subject
    for r in (start, end):
        assert all(0 <= r[f"dice_{part}"] <= 1 for part in CLASSES)
        assert 0 < r["hd95"] <= math.dist((0, 0, 0), (240, 240, 154))  # 120x120x77 voxels of 2 mm
    assert 0.5 < end["train_loss"] < 2.5
    examples = load_examples(tmp_path / FILE)
    assert sorted(e.client for e in examples) == [0, 1, 2, 3]
    assert all(e.image.shape == (120, 120) and e.truth[0].any() for e in examples)
