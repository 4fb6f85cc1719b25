"""What a federation learns: data, model, local training and evaluation of every client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from client_apps.errors import ConfigError
from client_apps.tasks.base import Evaluation, Task
from client_apps.tasks.classification import ClassificationTask

__all__ = ["ClassificationTask", "Evaluation", "Task", "build"]

PARTS = ("seed", "num_clients", "data_dir", "dataset", "model", "client", "evaluation")


def build(cfg: Mapping[str, Any]) -> Task:
    """Return the task of a configuration, one object per process for equal configurations.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration as plain values; only the keys in PARTS are looked at.

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range. No data is read yet; `Task.check` does.
    """
    return _build(json.dumps({key: cfg[key] for key in PARTS if key in cfg}, sort_keys=True))


@lru_cache(maxsize=2)
def _build(parts: str) -> Task:
    cfg = json.loads(parts)
    dataset = cfg.get("dataset")
    if not isinstance(dataset, Mapping) or dataset.get("name") != "fets2022":
        return ClassificationTask(cfg)
    try:
        from client_apps.tasks.segmentation import SegmentationTask  # its MONAI takes 4 seconds to import
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("monai", "nibabel"):
            raise
        raise ConfigError("dataset=fets2022 needs MONAI and nibabel; pip install 'fedconcord[fets]'.") from error
    return SegmentationTask(cfg)
