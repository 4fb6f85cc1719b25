"""The package as others get it: the wheel works outside the repository, rooms keep to themselves, README is true."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.common import ndarrays_to_parameters
from torch import nn

from client_apps import make_client_app
from experiments.config import compose
from experiments.engine import SerialGrid

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, unpacked."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    # Building leaves folders behind, so it happens beside a copy of what is needed.
    for name in ("pyproject.toml", "README.md", "LICENSE", "strategies", "client_apps", "experiments", "conf"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), "."]
    done = subprocess.run([sys.executable, *words], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    zipfile.ZipFile(built).extractall(out / "unpacked")
    return out / "unpacked"


def test_the_wheel_composes_every_experiment_outside_the_repository(wheel, tmp_path):
    script = """
import sys, pathlib, conf, experiments
assert pathlib.Path(experiments.__file__).is_relative_to(sys.argv[1]), experiments.__file__
from experiments.config import compose
for path in (pathlib.Path(conf.__file__).parent / "experiment").glob("*.yaml"):
    print(compose([f"experiment={path.stem}", "output_dir=x"])["model"]["name"])
"""
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(wheel)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["cnn", "cnn", "gpt", "linear", *["mlp"] * 5, "resnet", "resnet", "unet3d"]
    assert (wheel / "strategies" / "py.typed").exists()


def imports(path: Path) -> set[str]:
    """Top-level names a file imports absolutely."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        (
            "strategies",
            {"experiments", "client_apps", "conf", "hydra", "omegaconf", "ray", "datasets", "flwr_datasets"},
        ),
        ("client_apps", {"experiments", "strategies", "conf", "hydra", "omegaconf", "ray"}),
        ("strategies/solvers", {"flwr", "numpy", "hydra", "ray"}),
    ],
)
def test_arrows_run_one_way(room, forbidden):
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        assert not imports(path) & forbidden, path


def test_no_pickle_is_ever_read():
    for room in ("strategies", "client_apps", "experiments"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            assert "pickle" not in imports(path), path
            assert not re.search(r"torch\.load\(|allow_pickle=True|np\.load\(|yaml\.load\(", text), path


def test_the_readmes_examples_train_the_same_model(tmp_path):
    """The ServerApps shown in README.md, against digits clients."""
    legacy, message, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    cfg = compose(["num_clients=10", "client.lr=0.1", f"output_dir={tmp_path}"])
    names: dict = {}

    def serve(block: str) -> None:
        exec(compile(block, "README.md", "exec"), names)
        grid = SerialGrid(make_client_app(cfg), 10)
        context = Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config={})
        names["app"](grid, context)

    serve(legacy)
    strategy = names["strategy"]
    names["model"] = nn.ModuleDict({"layers": names["model"]})  # as the clients' model calls its tensors
    serve(message)
    for a, b in zip(strategy._model.arrays, names["model"].state_dict().values(), strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    state = strategy.state_dict()
    assert state["round"] == 3
    assert set(state["memory"]) == {"reference/1", "reference/3", "reference/5"}
    assert all(np.isclose(float(t.norm()), 1) for t in state["memory"].values())


def test_the_readmes_checkpoints_go_on(tmp_path, monkeypatch):
    """The Checkpointed strategy shown there, made again after a checkpoint."""
    monkeypatch.chdir(tmp_path)
    *_, block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

    def made() -> dict:
        names: dict = {}
        exec(compile(block, "README.md", "exec"), names)
        return names

    names = made()
    assert (names["config"].num_rounds, names["strategy"].rounds_done) == (200, 0)
    start = ndarrays_to_parameters([np.zeros(3, np.float32)])
    names["strategy"]._folder.save(10, start, names["strategy"].strategy)
    assert made()["config"].num_rounds == 190


def test_every_make_target_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    found = re.findall(r"^make (\w+)|`make (\w+)", README, re.MULTILINE)
    named = {a or b for a, b in found}
    assert {"demo", "test", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
