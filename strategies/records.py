"""Models, configs and metrics as the records that Flower's messages carry, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import Parameters, Scalar

from .updates import UnusableTensor, decode

NUMPY = "numpy.ndarray"
"""The serialization of tensors, `Array.stype`, that is read and written: `.npy` bytes."""


def spellings(key: str) -> tuple[str, ...]:
    """Return a key as it is, and as it reads with underscores and with hyphens: the two APIs' habits."""
    return tuple(dict.fromkeys((key, key.replace("-", "_"), key.replace("_", "-"))))


@dataclass(frozen=True)
class NamedModel:
    """A model as strategies hold it, tensors in an order, with the names they have in an `ArrayRecord`."""

    names: tuple[str, ...]
    parameters: Parameters

    def is_made_of(self, names: tuple[str, ...], tensors: Sequence[bytes]) -> bool:
        """Say whether it is these tensors: the same bytes objects, which never change."""
        return names == self.names and all(a is b for a, b in zip(tensors, self.parameters.tensors, strict=True))

    def with_tensors(self, parameters: Parameters) -> NamedModel:
        """Return other tensors by the same names.

        Raises
        ------
        ValueError
            If there are more or fewer.
        """
        if len(parameters.tensors) != len(self.names):
            raise ValueError(
                f"the strategy has {len(parameters.tensors)} tensors for a model of {len(self.names)}; "
                "start from the model that it was made for."
            )
        return NamedModel(self.names, parameters)

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Return its tensors, as views.

        Raises
        ------
        ValueError
            Naming the first tensor that cannot be read.
        """
        views = []
        for name, tensor in zip(self.names, self.parameters.tensors, strict=True):
            try:
                views.append(decode(tensor))
            except UnusableTensor as error:
                raise ValueError(f"tensor {name!r} of the global model cannot be read: {error}.") from error
        return views

    def record(self) -> ArrayRecord:
        """Return the model as a record; its tensors are not copied."""
        return ArrayRecord(
            {
                name: Array(str(view.dtype), view.shape, NUMPY, bytes(tensor))
                for name, tensor, view in zip(self.names, self.parameters.tensors, self.arrays(), strict=True)
            }
        )


def config_record(server_round: int, given: ConfigRecord, wanted: Mapping[str, Scalar]) -> ConfigRecord:
    """Return what clients are told.

    Parameters
    ----------
    server_round : int
    given : ConfigRecord
        What the ServerApp tells them.
    wanted : mapping
        What the strategy does; it wins, and is told in both APIs' spellings.

    Raises
    ------
    ValueError
        If the strategy tells something that no record holds.
    """
    merged: dict[str, Any] = {**given, "server-round": server_round}
    for key, value in wanted.items():
        merged.update(dict.fromkeys(spellings(key), value))
    merged.update(wanted)
    record = ConfigRecord()
    for key, value in merged.items():
        try:
            record[key] = value.item() if isinstance(value, np.generic) else value
        except TypeError as error:
            raise ValueError(
                f"clients cannot be told {key}={value!r}, which no ConfigRecord holds; use a number, a text, true or "
                "false, bytes, or a list of one of these."
            ) from error
    return record


def metric_record(metrics: Mapping[str, Scalar]) -> MetricRecord:
    """Return the numbers among metrics."""
    record = MetricRecord()
    for key, value in metrics.items():
        if isinstance(value, Integral | np.bool_):
            record[key] = int(value)
        elif isinstance(value, Real):
            record[key] = float(value)
    return record
