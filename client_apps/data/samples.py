"""A decoded data set in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_apps.errors import ConfigError


@dataclass(frozen=True)
class Samples:
    """Images as bytes: they are normalised batch by batch, which keeps a data set four times smaller.

    Parameters
    ----------
    images : ndarray of uint8, shape (n, channels, height, width), C-contiguous
        Pixels in 0..255.
    labels : ndarray of int64, shape (n,)
        Classes in 0..num_classes-1.
    num_classes : int
        Number of classes of the data set, not only of those that occur.
    owners : ndarray of str, shape (n,), or None
        Natural client of every sample, such as its writer.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    num_classes: int
    owners: NDArray[np.str_] | None = None


def check_labels(labels: NDArray[np.int64], num_classes: int, where: str) -> None:
    """Raise ConfigError, naming the file, where a label is outside 0..num_classes-1."""
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if wrong.size:
        raise ConfigError(f"{where} holds the label {wrong[0]}, outside 0..{num_classes - 1}; fetch the file again.")
