"""Examples on disk: a run's segmented slices in one safetensors file, arrays and a JSON list, no pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from client_apps.tasks.base import Example

FILE = "examples.safetensors"
"""Its name in a run's folder."""

_FACTS = ("subject", "client", "modality", "plane")
_MASKS = ("truth", "prediction")
# Of this size or beyond, differences of float32 might not be finite.
_HUGE = 1e30


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write examples: per example ``<i>.image`` (float32), ``<i>.truth`` and ``<i>.prediction`` (uint8, 0 or 1).

    The other fields are a JSON list under the file's metadata key ``examples``.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for index, example in enumerate(examples):
        arrays[f"{index}.image"] = np.ascontiguousarray(example.image, np.float32)
        for name in _MASKS:
            arrays[f"{index}.{name}"] = np.ascontiguousarray(getattr(example, name), np.uint8)
    facts = [{name: getattr(example, name) for name in _FACTS} for example in examples]
    save_file(arrays, path, metadata={"examples": json.dumps(facts)})


def load_examples(path: Path) -> list[Example]:
    """Read what `save_examples` wrote.

    Raises
    ------
    OSError
        If the file cannot be opened.
    ValueError
        If it is damaged or holds something else.
    """
    try:
        with safe_open(path, "np") as file:
            facts = json.loads((file.metadata() or {})["examples"])
            examples = [
                Example(
                    **{name: kind(fact[name]) for name, kind in zip(_FACTS, (str, int, str, int), strict=True)},
                    image=file.get_tensor(f"{index}.image").astype(np.float32),
                    truth=file.get_tensor(f"{index}.truth").astype(bool),
                    prediction=file.get_tensor(f"{index}.prediction").astype(bool),
                )
                for index, fact in enumerate(facts)
            ]
    except (SafetensorError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no examples: {' '.join(str(error).split())}.") from error
    for example in examples:
        if not example.image.size or not (np.abs(example.image) < _HUGE).all():
            name = f"the image of {example.subject}"
            raise ValueError(f"{path} holds no examples: {name} is empty, or not of numbers below {_HUGE:g}.")
        shape = (3, *example.image.shape)
        if example.image.ndim != 2 or example.truth.shape != shape or example.prediction.shape != shape:
            raise ValueError(f"{path} holds no examples: the masks of {example.subject} do not fit its image.")
    return examples
