"""The room's walls: nothing on a client imports the server's rooms, Hydra, Ray or pickle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import client_apps

ROOM = Path(client_apps.__file__).parent
FORBIDDEN = {"strategies", "experiments", "hydra", "omegaconf", "ray", "pickle", "cloudpickle", "joblib"}


@pytest.mark.parametrize("file", sorted(ROOM.rglob("*.py")), ids=lambda file: file.relative_to(ROOM).as_posix())
def test_imports_stay_inside(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert not imported & FORBIDDEN
