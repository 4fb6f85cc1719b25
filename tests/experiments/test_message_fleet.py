"""MessageStrategy and Checkpointed in a ServerApp of one's own on a real SuperLink: killed, resumed, the same bits."""

import importlib.util
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from experiments.engine import SerialGrid

from .cli import command
from .marked import processes_with
from .message_fleet import NODES, ROUNDS, write


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes through /proc")
@pytest.mark.timeout(900)
def test_a_server_app_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    done = command(sys.executable, "-m", "tests.experiments.message_fleet", str(tmp_path / "fleet"), timeout=840)
    logs = "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.glob("fleet/*.log")))
    assert done.returncode == 0, done.stdout + logs
    assert processes_with(str(tmp_path)) == []
    assert "killed 1 with ['round-000001'" in done.stdout
    assert f"'round-{ROUNDS:06d}'" not in done.stdout  # it was not over
    assert "Resuming after round" in done.stdout

    write(tmp_path / "app")
    server, client = (loaded(tmp_path / "app" / "ownapp" / f"{name}.py") for name in ("server", "client"))
    whole = server.serve(SerialGrid(client.app, NODES), tmp_path / "whole")
    saved = load_file(tmp_path / "fleet" / "checkpoints" / f"round-{ROUNDS:06d}" / "model.safetensors")
    assert list(saved) == ["layer.weight"]
    assert saved["layer.weight"].tobytes() == whole.arrays["layer.weight"].numpy().tobytes()
