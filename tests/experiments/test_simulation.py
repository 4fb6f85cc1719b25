"""Whole runs on Ray: what they leave behind, that they can be repeated bit for bit, and that they survive losses."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from .cli import command, rounds, run

pytestmark = pytest.mark.ray

SMALL = ("num_clients=12", "clients_per_round=6", "num_rounds=3", "client.lr=0.1", "tracking.progress=false")
EVALUATED = ("accuracy", "accuracy_std", "worst10", "best10", "accuracy_weighted", "clients_evaluated")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same run on both Ray engines with two workers, with one and the clients evaluating, and in one process."""
    base = tmp_path_factory.mktemp("runs")
    variants = {
        "two": ("simulation=flower",),
        "one": ("simulation=flower", "simulation.num_cpus=1", "evaluation=federated"),
        "ray-two": ("simulation=ray", "simulation.num_cpus=2"),
        "ray-one": ("simulation=ray", "simulation.num_cpus=1", "evaluation=federated"),
        "serial": ("simulation=serial",),
    }
    for name, overrides in variants.items():
        found = run(*SMALL, *overrides, f"output_dir={base / name}")
        assert found.returncode == 0, found.stdout
    return {name: base / name for name in variants}


def test_a_run_leaves_its_records(runs):
    folder = runs["two"]
    records = rounds(folder)
    assert [r["round"] for r in records] == [0, 1, 2, 3]
    for r in records[1:]:
        assert (r["clients_sampled"], r["clients_accepted"], r["failed_round"]) == (6, 6, False)
        assert r["conflict_share_after"] == 0
        assert r["train_loss"] > 0
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["rounds"]) == ("finished", 3)
    clients = pq.read_table(folder / "clients.parquet").to_pandas()
    assert len(clients) == 4 * 12
    last = clients[clients["round"] == 3]
    assert last["accuracy"].mean() == pytest.approx(records[-1]["accuracy"], rel=1e-6)
    model = load_file(folder / "model.safetensors")
    assert sum(a.size for a in model.values()) == 64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
    assert (folder / "config.yaml").exists()
    assert (folder / "run.log").exists()
    assert list(folder.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("other", ["one", "ray-two", "ray-one", "serial"])
def test_workers_and_engines_do_not_change_a_bit(runs, other):
    assert (runs["two"] / "model.safetensors").read_bytes() == (runs[other] / "model.safetensors").read_bytes()
    for a, b in zip(rounds(runs["two"])[-3:], rounds(runs[other])[-3:], strict=True):
        same = ("round", "train_loss", "direction_norm", "min_alignment", "cosine_to_mean", "parameter_norm")
        assert [a[k] for k in same] == [b[k] for k in same]


@pytest.mark.parametrize("federated", ["one", "ray-one"])
def test_server_and_clients_evaluate_alike(runs, federated):
    server, clients = rounds(runs["two"])[1:], rounds(runs[federated])
    assert [r["round"] for r in clients] == [1, 2, 3]
    for a, b in zip(server, clients, strict=True):
        assert [a[k] for k in EVALUATED] == [b[k] for k in EVALUATED]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    tables = []
    for name in ("two", federated):
        table = pq.read_table(runs[name] / "clients.parquet").to_pandas()
        tables.append(table[table["round"] > 0].sort_values(["round", "client"]).reset_index(drop=True))
    for column in ("round", "client", "num_examples", "accuracy"):
        np.testing.assert_array_equal(tables[0][column], tables[1][column])


def test_an_output_folder_is_never_overwritten(runs):
    before = (runs["serial"] / "metrics.jsonl").read_bytes()
    found = run(*SMALL, "simulation=serial", f"output_dir={runs['serial']}")
    assert found.returncode == 1
    assert "holds an earlier run" in " ".join(found.stdout.split())
    assert "Traceback" not in found.stdout
    assert (runs["serial"] / "metrics.jsonl").read_bytes() == before


def test_a_run_that_cannot_go_on_says_why_and_fails(tmp_path):
    found = run(*SMALL, "simulation=serial", "client.lr=1e30", "strategy.max_failed_rounds=2", f"output_dir={tmp_path}")
    assert found.returncode == 1
    text = " ".join(found.stdout.split())
    assert "RoundsFailed: 2 rounds in a row failed" in text
    assert "NaN or Inf" in text
    assert "Traceback" not in text
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    records = rounds(tmp_path)
    assert [r["failed_round"] for r in records[1:]] == [True, True]
    assert records[-1]["clients_rejected"] >= 4
    # The model that is saved is the last good one: the initial one.
    assert all(np.isfinite(a).all() for a in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_clients_that_raise_or_die_are_counted_and_the_run_goes_on(engine, tmp_path):
    found = command(sys.executable, "-m", "tests.experiments.lossy_client", engine, str(tmp_path))
    assert found.returncode == 0, found.stdout
    first, second, third = rounds(tmp_path)[1:]
    # Of 12 clients, 1, 5 and 9 always raise.
    assert (first["clients_accepted"], first["clients_failed"], first["failed_round"]) == (9, 3, False)
    assert "lost its data" in first["failure_reasons"]
    if engine == "ray":
        assert (second["clients_accepted"], second["clients_failed"]) == (8, 4)  # those three, and the one that died
        assert "(partition 2): its process died" in second["failure_reasons"]
        assert (third["clients_accepted"], third["clients_failed"]) == (9, 3)
        return
    assert second["clients_failed"] >= 4  # those three, the one that died, and whoever shared its process
    for r in (second, third):
        # Flower does not replace a dead worker, and it fails at once what it is given: any number of the others
        # may be lost with it. Every loss is counted, and a round with too few results leaves the model alone.
        assert r["clients_accepted"] + r["clients_failed"] == 12
        assert r["clients_failed"] >= 3
        assert r["failed_round"] is (r["clients_accepted"] < 2)
    assert all(np.isfinite(a).all() for a in load_file(tmp_path / "model.safetensors").values())
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"


def test_a_sweep_ends_in_a_table_and_curves_and_names_what_failed(tmp_path):
    found = run(
        "-m", *SMALL, "simulation=serial", "strategy=craft,fedavg", "seed=0,1",
        "num_rounds=2", f"hydra.sweep.dir={tmp_path}",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    for word in ("craft", "fedavg", "accuracy", "worst"):
        assert word in found.stdout
    with (tmp_path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((r["strategy"], r["seeds"]) for r in rows) == [("craft", "2"), ("fedavg", "2")]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| craft |" in (tmp_path / "report.md").read_text()

    found = run("-m", *SMALL, "simulation=serial", "client.lr=0.1,-1", f"hydra.sweep.dir={tmp_path / 'second'}")
    assert found.returncode == 1
    assert "client.lr must be a number above 0" in " ".join(found.stdout.split())
    assert "1 of the sweep's runs failed" in found.stdout
    assert (tmp_path / "second" / "report.csv").exists()
    assert "Traceback" not in found.stdout

    # A folder cannot be shared by a sweep's runs.
    found = run("-m", *SMALL, "simulation=serial", "output_dir=x", f"hydra.sweep.dir={tmp_path / 'third'}")
    assert found.returncode == 1
    assert "set hydra.sweep.dir" in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["foo=1"], "foo"),
        (["strategy=crafty"], "crafty"),
        (["strategy=null"], "a config group was set to null"),
        (["client.lr=???"], "client.lr"),
        (["model=resnet20"], "needs images of"),
        (["output_dir={file}/x"], "Not a directory"),
    ],
)
def test_a_command_line_that_cannot_run_is_one_sentence(words, said, tmp_path):
    (tmp_path / "file").write_text("")
    words = [f"output_dir={tmp_path / 'out'}", *(w.format(file=tmp_path / "file") for w in words)]
    found = run(*SMALL, "simulation=serial", *words)
    assert found.returncode == 1
    assert said in " ".join(found.stdout.split())
    assert "Traceback" not in found.stdout
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_evaluating_now_and_then(tmp_path):
    found = run(*SMALL, "simulation=serial", "evaluation.every=2", f"output_dir={tmp_path}")
    assert found.returncode == 0, found.stdout
    assert [r["round"] for r in rounds(tmp_path) if "accuracy" in r] == [0, 2, 3]


def test_a_batch_norm_model_trains_on_real_images(data_dir, tmp_path):
    found = run(
        "dataset=cifar10", f"data_dir={data_dir}", "model=resnet20", "model.norm=batch", "num_clients=100",
        "clients_per_round=2", "num_rounds=2", "dataset.max_samples=25", "simulation=serial", "evaluation.every=2",
        "strategy.scale=mean_norm", "strategy.server_lr=1", f"output_dir={tmp_path}",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    records, model = rounds(tmp_path), load_file(tmp_path / "model.safetensors")
    assert records[-1]["clients_accepted"] == 2
    counters = [a for name, a in model.items() if name.endswith("num_batches_tracked")]
    assert all(a.dtype == np.int64 and a == 2 for a in counters)  # one step of at most 20 samples a round
    variances = [a for name, a in model.items() if name.endswith("running_var")]
    assert len(counters) == len(variances) == 19
    assert all(a.dtype == np.float32 and (a > 0).all() for a in variances)
