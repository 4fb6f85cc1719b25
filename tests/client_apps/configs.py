"""Configurations for the tests of the client apps."""

from __future__ import annotations

from typing import Any


def config(**changes: Any) -> dict[str, Any]:
    """Return a small run on digits, with `section__key=value` changes."""
    cfg: dict[str, Any] = {
        "seed": 0,
        "num_clients": 10,
        "data_dir": None,
        "dataset": {"name": "digits", "partition": {"kind": "iid"}, "test_fraction": 0.2, "augment": "none"},
        "model": {"name": "mlp", "hidden": [16]},
        "client": {"lr": 0.1, "lr_decay": 1.0, "local_epochs": 1, "batch_size": 20, "device": "cpu"},
        "evaluation": {"mode": "server", "every": 1, "batch_size": 64},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = cfg
        for section in sections:
            target = target[section]
        target[key] = value
    return cfg
