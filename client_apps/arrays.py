"""A model's state_dict as a list of NumPy arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


def get_arrays(model: nn.Module) -> list[NDArray[Any]]:
    """Copy every tensor of the model, in state_dict order and with its own dtype and shape."""
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def set_arrays(model: nn.Module, arrays: Sequence[NDArray[Any]]) -> None:
    """Overwrite every tensor of the model, which keeps its dtypes and its device.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    arrays : Sequence[ndarray]
        One array for each entry of the state_dict, in its order; they may be read-only.

    Raises
    ------
    ValueError
        The number of arrays or the shape of one is not the model's; nothing has been changed then.
    """
    state = model.state_dict()
    if len(arrays) != len(state):
        raise ValueError(
            f"Received {len(arrays)} arrays for a model of {len(state)} tensors; "
            "server and clients must be given the same model configuration."
        )
    for (name, tensor), array in zip(state.items(), arrays, strict=True):
        if np.shape(array) != tuple(tensor.shape):
            raise ValueError(
                f"Received an array of shape {np.shape(array)} for {name}, which has {tuple(tensor.shape)}; "
                "server and clients must be given the same model configuration."
            )
    for tensor, array in zip(state.values(), arrays, strict=True):
        if tensor.device.type == "cpu":
            np.copyto(tensor.numpy(), array, casting="unsafe")
        else:
            tensor.copy_(torch.tensor(array))  # a copy: a read-only array cannot be shared with torch
