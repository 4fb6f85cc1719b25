"""`flwr run .` from a bundle gives the run that `python -m experiments.run` gives."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.processes import free_port

from .cli import ROOT, command, rounds, run

pytestmark = pytest.mark.ray

FLWR = Path(sys.executable).with_name("flwr")
OVERRIDES = "num_clients=8 clients_per_round=4 num_rounds=2 tracking.progress=false"


def processes_naming(text: str) -> list[int]:
    """Ids of processes with `text` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if text in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def end(text: str) -> None:
    """End the processes that name `text`, and wait until they are gone."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_naming(text):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        limit = time.monotonic() + 20
        while processes_naming(text) and time.monotonic() < limit:
            time.sleep(0.1)


@pytest.fixture
def flower(tmp_path):
    """Environment of a local SuperLink of its own, stopped afterwards."""
    home = tmp_path / "flwr-home"
    home.mkdir()
    project = tmp_path / "project"
    ignored = shutil.ignore_patterns(".venv", ".git", "outputs", "multirun", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, project, ignore=ignored)
    environment = {
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "PATH": f"{FLWR.parent}{os.pathsep}{os.environ['PATH']}",
    }
    try:
        yield project, environment
    finally:
        end(str(home))


def flwr_run(project: Path, environment: dict[str, str], overrides: str, nodes: int = 8) -> subprocess.CompletedProcess:
    return command(
        str(FLWR), "run", ".", "--stream", "-c", f'overrides="{overrides}"',
        "--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1",
        cwd=project, **environment,
    )  # fmt: skip


def last_status(project: Path, environment: dict[str, str]) -> str:
    listed = command(str(FLWR), "ls", "--format", "json", cwd=project, **environment).stdout
    runs = json.loads(listed[listed.index("{") :])["runs"]
    return max(runs, key=lambda r: r["pending-at"])["status"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds and ends the SuperLink through /proc")
def test_the_bundle_runs_the_same_composed_config(flower, tmp_path):
    project, environment = flower
    direct = tmp_path / "direct"
    found = flwr_run(project, environment, OVERRIDES)
    assert last_status(project, environment) == "finished:completed", found.stdout
    (status,) = project.glob("outputs/*/*/status.json")
    bundled = status.parent
    found = run(*OVERRIDES.split(), "simulation=serial", f"output_dir={direct}")
    assert found.returncode == 0, found.stdout
    assert (bundled / "model.safetensors").read_bytes() == (direct / "model.safetensors").read_bytes()
    timing = {"seconds", "round_seconds", "aggregate_seconds"}
    for a, b in zip(rounds(bundled), rounds(direct), strict=True):
        assert {k: v for k, v in a.items() if k not in timing} == {k: v for k, v in b.items() if k not in timing}

    # What cannot run fails before any client starts, in words.
    found = flwr_run(project, environment, OVERRIDES, nodes=6)
    assert "ConfigError: the federation has 6 nodes but num_clients=8" in found.stdout
    assert last_status(project, environment) == "finished:failed"
    assert len(list(project.glob("outputs/*/*/status.json"))) == 1
