"""Every strategy in whole runs: that one can be repeated bit for bit, and gives the seed's model and no other."""

import json

import pytest

from experiments.config import compose
from experiments.run import run
from tests.experiments.test_hparams import options

SMALL = (
    *(
        "num_clients=8",
        "clients_per_round=4",
        "num_rounds=2",
        "evaluation.every=2",
        "client.lr=0.1",
        "model.hidden=[8]",
    ),
    *("simulation=serial", "tracking.progress=false", "tracking.tensorboard=false"),
)


@pytest.mark.parametrize("strategy", options("strategy"))
def test_a_run_repeats_bit_for_bit_and_follows_its_seed(strategy, tmp_path):
    models = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        folder = tmp_path / name
        run(compose([*SMALL, f"strategy={strategy}", f"seed={seed}", f"output_dir={folder}"]))
        models.append((folder / "model.safetensors").read_bytes())
        rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [r["clients_accepted"] for r in rounds[1:]] == [4, 4]
        assert not any(r["failed_round"] for r in rounds[1:])
    assert models[0] == models[1]
    assert models[0] != models[2]
