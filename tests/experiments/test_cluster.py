"""A two-node Ray cluster on loopback: both engines run on it, and finish when a node is killed mid-round."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from .cli import command, rounds

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_a_node_is_killed_mid_round_and_the_run_finishes(engine, tmp_path):
    found = command(sys.executable, "-m", "tests.experiments.two_nodes", engine, str(tmp_path), timeout=500)
    assert found.returncode == 0, found.stdout
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("seen-1-*"))) == 2  # both nodes were at work
    records = rounds(tmp_path / "run")[1:]
    assert [r["round"] for r in records] == [1, 2, 3]
    assert records[0]["clients_accepted"] == 12
    for r in records[1:]:
        if engine == "ray":
            # Clients of the dead node run again on the other.
            assert (r["clients_accepted"], r["clients_failed"]) == (12, 0)
        else:
            # Flower goes on giving messages to the dead worker: any share of a round may be lost, and is counted.
            assert r["clients_accepted"] + r["clients_failed"] == 12
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"
    assert all(np.isfinite(a).all() for a in load_file(tmp_path / "run" / "model.safetensors").values())
