"""What a federation learns: data, model, local training and evaluation of every client."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from client_apps.config import choice
from client_apps.errors import ConfigError
from client_apps.tasks.base import Evaluation, Task
from client_apps.tasks.classification import ClassificationTask

__all__ = ["ClassificationTask", "Evaluation", "Task", "build"]

PARTS = ("seed", "num_clients", "data_dir", "task", "dataset", "model", "client", "evaluation")

# Which task a data set is made for; any other is for classification.
_TASK_OF = {"fets2022": "segmentation", "copying": "lora", "linear": "regression"}
# Module and class of a task, and the extra its libraries come with: they are imported only where it is chosen.
_TASKS = {
    "classification": ("classification", "ClassificationTask", None),
    "segmentation": ("segmentation", "SegmentationTask", ("fets", "monai", "nibabel")),
    "lora": ("lora", "LoraTask", ("lora", "transformers", "peft")),
    "regression": ("regression", "RegressionTask", None),
}


def build(cfg: Mapping[str, Any]) -> Task:
    """Return the task of a configuration, one object per process for equal configurations.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration as plain values; only the keys in PARTS are looked at. `task.name` is the
        task's, or `auto` for that of the data set.

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range. No data is read yet; `Task.check` does.
    """
    return _build(json.dumps({key: cfg[key] for key in PARTS if key in cfg}, sort_keys=True))


@lru_cache(maxsize=2)
def _build(parts: str) -> Task:
    cfg = json.loads(parts)
    module, name, needs = _TASKS[_task_of(cfg)]
    try:
        found = getattr(importlib.import_module(f"client_apps.tasks.{module}"), name)
    except ModuleNotFoundError as error:
        if needs is None or (error.name or "").partition(".")[0] not in needs[1:]:
            raise
        extra, *libraries = needs
        raise ConfigError(
            f"dataset={cfg['dataset']['name']} needs {' and '.join(libraries)}; pip install 'fedconcord[{extra}]'."
        ) from error
    task: Task = found(cfg)
    return task


def _task_of(cfg: Mapping[str, Any]) -> str:
    """Return the name of a configuration's task; one that its data set is not made for is refused."""
    section, dataset = cfg.get("task", {}), cfg.get("dataset")
    if not isinstance(section, Mapping):
        raise ConfigError(f"task must be a group of keys, not {section!r}.")
    name = section.get("name", "auto")
    choice("task.name", name, ["auto", *_TASKS])
    data = dataset.get("name") if isinstance(dataset, Mapping) else None
    made_for = _TASK_OF.get(str(data), "classification")
    if name not in ("auto", made_for):
        raise ConfigError(f"task={name} cannot learn dataset={data}, which is for task={made_for}; change one of them.")
    return made_for
