"""GlobalModel: θ_t as Flower holds it and as arrays, and how a round turns it into θ_{t+1}."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from flwr.common import Parameters, ndarray_to_bytes
from torch import Tensor

from .layers import Kind, Layer, LayerMap
from .updates import Array, ClientUpdates, UnusableTensor, decode_all, is_finite

logger = logging.getLogger(__name__)

Merge = Callable[[ClientUpdates, Sequence[Array]], Array]
"""Makes one tensor of those that the clients sent, in canonical order."""

# A model this many times longer than at the start has left every useful region of weight space.
_GROWTH = 1e4


class GlobalModel:
    """The global model of a round.

    Parameters
    ----------
    parameters : Parameters
        As exchanged with Flower; kept, so that an unchanged model is the same object.
    layers : LayerMap, optional
        None: each floating-point tensor is a layer of its own.

    Attributes
    ----------
    arrays : list of ndarray
        Its tensors, views of `parameters` where it was decoded from them.
    layers : LayerMap
        Checked against the arrays.
    norm : float
        Euclidean norm of all trainable tensors.

    Raises
    ------
    ValueError
        If the parameters cannot be read, are not finite or do not fit `layers`.
    """

    def __init__(self, parameters: Parameters, layers: LayerMap | None) -> None:
        try:
            arrays = decode_all(parameters)
        except UnusableTensor as error:
            raise ValueError(f"the global model cannot be read: {error}.") from error
        if not arrays:
            raise ValueError("the global model has no tensors; pass initial_parameters with at least one array.")
        self.layers = LayerMap.from_arrays(arrays) if layers is None else layers.for_arrays(arrays)
        for name, array in zip(self.layers.names, arrays, strict=True):
            if not is_finite(array):
                raise ValueError(f"the global model holds NaN or Inf in tensor {name!r}; start from finite weights.")
        self.parameters = parameters
        self.arrays = arrays
        self.norm = self._norm()

    def flat(self, layer: Layer, device: torch.device) -> Tensor:
        """Return θ_t of a layer, (d_q,), float64."""
        parts = [self.arrays[t].reshape(-1).astype(np.float64) for t in layer.tensors]
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def _norm(self) -> float:
        arrays = (self.arrays[t].astype(np.float64) for t in self.layers.indices("trainable"))
        return math.sqrt(sum(float(np.square(x, out=x).sum()) for x in arrays))


class Successor:
    """θ_{t+1} while it is being put together, from θ_t and a direction for each layer."""

    def __init__(self, model: GlobalModel) -> None:
        self._model = model
        # Serialised as soon as they are known: the new model is held once, not as arrays and as bytes.
        self._tensors: dict[int, bytes] = {}

    def move(self, layer: Layer, step: Tensor) -> None:
        """Add a step, (d_q,), to the tensors of a layer; dtypes and shapes stay.

        Raises
        ------
        FloatingPointError
            If the result is not finite in the tensors' dtype.
        """
        flat = step.cpu().numpy()
        offset = 0
        for t in layer.tensors:
            old = self._model.arrays[t]
            part = flat[offset : offset + old.size].reshape(old.shape)
            offset += old.size
            with np.errstate(over="ignore", invalid="ignore"):
                new = np.asarray(old + part).astype(old.dtype)
            if not is_finite(new):
                raise FloatingPointError(f"the step of layer {layer.name!r} is not finite")
            self._tensors[t] = ndarray_to_bytes(new)

    def with_buffers_as_they_are(self) -> Parameters:
        """Return the moved layers with the other tensors of θ_t."""
        old = self._model.parameters
        tensors = [self._tensors.get(t, old.tensors[t]) for t in range(len(self._model.arrays))]
        return Parameters(tensors, old.tensor_type)

    def finish(self, updates: ClientUpdates, merge_buffer: Merge, merge_counter: Merge) -> GlobalModel:
        """Merge what the clients made of buffers and counters, and return θ_{t+1}."""
        merges: dict[Kind, Merge] = {"buffer": merge_buffer, "counter": merge_counter}
        for kind, merge in merges.items():
            for t in self._model.layers.indices(kind):
                sent = updates.tensors(t)
                if kind == "counter":  # all of one dtype: NumPy would take int64 and uint64 together for float64
                    sent = [tensor.astype(self._model.arrays[t].dtype, copy=False) for tensor in sent]
                merged = np.asarray(merge(updates, sent))
                self._tensors[t] = ndarray_to_bytes(merged.astype(self._model.arrays[t].dtype))
        tensors = [self._tensors[t] for t in range(len(self._model.arrays))]
        return GlobalModel(Parameters(tensors, self._model.parameters.tensor_type), self._model.layers)


def warn_of_growth(norm: float, start: float, server_lr: float) -> None:
    """Log a warning where the model's norm has left its scale at the start."""
    if norm > _GROWTH * (1 + start):
        logger.warning(
            "the global model's norm is %.3g, it was %.3g at the start: the run diverges; lower server_lr (now %g)",
            norm,
            start,
            server_lr,
        )


def check_memory(
    memory: object, vectors: tuple[str, ...], matrices: tuple[str, ...], device: torch.device
) -> dict[str, Tensor]:
    """Copy remembered vectors and matrices to `device`, in their own precision.

    Raises
    ------
    ValueError
        If this is not a dict of finite vectors and matrices of these kinds, named "<kind>/<layer name>".
    """
    if not isinstance(memory, Mapping):
        raise ValueError("the state's memory must be a dict of tensors; pass what state_dict() returned.")
    copied = {}
    for key, value in memory.items():
        kind = str(key).partition("/")[0]
        if kind not in (*vectors, *matrices):
            known = ", ".join((*vectors, *matrices)) or "none"
            raise ValueError(f"the state's memory {key!r} is not one this strategy keeps ({known}).")
        real = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == (1 if kind in vectors else 2)
        if not real or not bool(torch.isfinite(value).all()):
            what = "vector" if kind in vectors else "matrix"
            raise ValueError(f"the state's memory {key!r} must be a {what} of finite numbers.")
        copied[str(key)] = value.detach().to(device, copy=True)
    return copied


def require_layers(layers: LayerMap, memory: dict[str, Tensor], matrices: tuple[str, ...] = ()) -> None:
    """Check that what is remembered, by "<kind>/<layer name>", has the sizes of a model's layers.

    Matrices are kept of every layer or of none: their rows belong together.

    Raises
    ------
    ValueError
        One sentence naming the first that does not fit.
    """
    sizes: dict[str, int | str] = {layer.name: layer.size for layer in layers.layers}
    for key, tensor in memory.items():
        name = key.partition("/")[2]
        if sizes.get(name) != tensor.shape[-1]:
            raise ValueError(
                f"the state remembers {tensor.shape[-1]} values for layer {name!r}, the model has "
                f"{sizes.get(name, 'no such layer')}; resume with the model that was saved."
            )
    for kind in matrices:
        lost = [name for name in sizes if f"{kind}/{name}" not in memory]
        if 0 < len(lost) < len(sizes):
            raise ValueError(
                f"the state's memory holds {kind!r} of other layers but not of {lost[0]!r}; pass what state_dict() "
                "returned."
            )
