"""ClientUpdates: what the clients sent in a round, vetted, in canonical order, read without copies.

`FitRes.parameters.tensors` are `.npy` byte strings, or memory that an engine lends for the round. They are
parsed, never unpickled, viewed in place and never written to; an update g_i = θ_i − θ_t exists only a block
of columns at a time.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import Code, FitRes, Parameters, Scalar, ndarray_to_bytes
from flwr.server.client_proxy import ClientProxy
from torch import Tensor

from .gram import Gram, block_columns, combine, gram
from .layers import Layer, LayerMap
from .options import is_real

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.generic]
OrderKey = Callable[[str], tuple[int, int, str]]
"""Maps a client id to what clients are sorted by."""
Requirement = tuple[Callable[[float], bool], str]
"""Whether a metric's value can be used, and what is wanted, in words."""


# What NumPy's header parser (ast and tokenize underneath) raises on text that is no header.
_UNREADABLE = (
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
    tokenize.TokenError,
)
# Numbers above this cannot be squared and summed in float64.
_LARGEST = 1e150
_MAX_DIMENSIONS = 32
_FLOAT32 = np.dtype(np.float32)
_MAGIC = b"\x93NUMPY"
# Characters of a reason kept; a client may send a message of any length.
_REASON = 300
# Numbers in a block from which two threads copy it.
_PARALLEL = 2**18


class UnusableTensor(ValueError):
    """A tensor that is not a plain numeric array; the message says what is wrong with it."""


@dataclass(frozen=True)
class Rejection:
    """A client whose result is not used this round, and why."""

    client: str
    reason: str

    def __str__(self) -> str:
        return one_line(f"client {self.client}: {self.reason}")


@dataclass(frozen=True)
class LayerDirection:
    """A proposed direction for one layer and its inner products with the clients' updates.

    Attributes
    ----------
    vector : Tensor, (d_q,), float64
    products : Tensor, (m,), float64
        ⟨g_i, vector⟩.
    mean_products : Tensor, (m,), float64
        ⟨g_i, ḡ⟩ with ḡ = Σ ρ_i g_i, the plain mean.
    squared_norms : Tensor, (m,), float64
        ‖g_i‖².
    diagnostics : mapping of str to Tensor
        0-d tensors a method reports about this layer (`residual`, `rank`).
    memory : mapping of str to Tensor
        What the method wants to remember of this layer if the round succeeds: float64 vectors, (d_q,), by kind
        (see `UpdateStrategy.remembers`).
    """

    vector: Tensor
    products: Tensor
    mean_products: Tensor
    squared_norms: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)

    def scaled(self, factor: Tensor) -> LayerDirection:
        """Return the same direction `factor` times as long."""
        return replace(self, vector=self.vector * factor, products=self.products * factor)

    def reporting(self, **diagnostics: Tensor) -> LayerDirection:
        """Return the same direction with these diagnostics."""
        return replace(self, diagnostics={**self.diagnostics, **diagnostics})

    def remembering(self, **memory: Tensor) -> LayerDirection:
        """Return the same direction with these vectors to remember, by kind."""
        return replace(self, memory={**self.memory, **memory})


def one_line(text: str) -> str:
    """Return a text of any origin on one line of bounded length; of a long one, the start and the end."""
    if len(text) > 8 * _REASON:
        text = f"{text[: 4 * _REASON]} {text[-4 * _REASON :]}"
    line = " ".join(text.split())
    return line if len(line) <= _REASON else f"{line[: _REASON // 3]} ... {line[-_REASON // 2 :]}"


def client_order(cid: str) -> tuple[int, int, str]:
    """Sort key of a client id: numbers by value, then everything else alphabetically."""
    text = str(cid)
    return (0, int(text), text) if re.fullmatch(r"-?[0-9]{1,40}", text) else (1, 0, text)


@functools.lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Parse the header of a `.npy` file; equal headers recur for every client, so they are parsed once."""
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"format version {version}")
    return shape, fortran, dtype


def _is_decoded(data: object) -> TypeGuard[Array]:
    """Say whether a tensor is an array of its values rather than a buffer of `.npy` bytes."""
    if not isinstance(data, np.ndarray):
        return False
    return data.dtype != np.uint8 or data.ndim != 1 or data[: len(_MAGIC)].tobytes() != _MAGIC


def _require_number(dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise UnusableTensor(f"dtype {dtype} is not a number of at most 64 bits")


def decode(data: bytes | Buffer | Array) -> Array:
    """View a tensor as an array, without a copy and without unpickling.

    Parameters
    ----------
    data : bytes, buffer or ndarray
        `.npy` bytes in any C-contiguous buffer, or an array of numbers, which is taken as it is. A 1-D uint8
        array that starts with the `.npy` magic string is a buffer of `.npy` bytes.

    Returns
    -------
    ndarray
        Read-only, C-contiguous except where the sender stored Fortran order, native byte order except where
        the sender stored another.

    Raises
    ------
    UnusableTensor
        If the bytes are not a `.npy` file of numbers of exactly the length its header states, or the array's
        dtype is not a real number of at most 64 bits.
    """
    if _is_decoded(data):
        _require_number(data.dtype)
        view = np.asarray(data).view()
        view.flags.writeable = False
        return view
    if not isinstance(data, bytes):
        try:
            data = memoryview(cast("Buffer", data)).cast("B")
        except (TypeError, ValueError, BufferError) as error:
            raise UnusableTensor("not a contiguous buffer of .npy bytes") from error
    prefix = bytes(data[:12])
    if len(prefix) < 12 or not prefix.startswith(_MAGIC):
        raise UnusableTensor("not a .npy array")
    wide = prefix[6] > 1
    start = (12 if wide else 10) + int.from_bytes(prefix[8:12] if wide else prefix[8:10], "little")
    if start > min(len(data), 4096):
        raise UnusableTensor("its .npy header is longer than the data or than 4096 bytes")
    try:
        shape, fortran, dtype = _parse_header(bytes(data[:start]))
    except _UNREADABLE as error:
        raise UnusableTensor("its .npy header cannot be read") from error
    _require_number(dtype)
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise UnusableTensor("its header states a shape that no array has")
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise UnusableTensor(f"its header promises shape {shape} of {dtype} but {len(data) - start} bytes follow")
    flat = np.frombuffer(data, dtype, offset=start)
    flat.flags.writeable = False
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # an empty array may still have dimensions beyond what NumPy can count
        raise UnusableTensor("its header states a shape that no array has") from error


def is_finite(array: Array) -> bool:
    """Say whether an array holds no NaN and no Inf, in one read and without a temporary of its size."""
    if array.dtype.kind != "f" or array.size == 0:
        return True
    with np.errstate(all="ignore"):
        return _is_finite(array)


def _is_finite(array: Array) -> bool:
    total = np.add.reduce(array, axis=None, dtype=max(array.dtype, _FLOAT32))
    # A finite sum proves it; a sum may also overflow over finite values, and only then each is looked at.
    return math.isfinite(total) or bool(np.isfinite(array).all())


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "copy")


def decode_all(parameters: Parameters) -> list[Array]:
    """Decode every tensor of a Flower `Parameters`, as views.

    Raises
    ------
    UnusableTensor
        Naming the position of the first tensor that cannot be read.
    """
    arrays = []
    for i, data in enumerate(parameters.tensors):
        try:
            arrays.append(decode(data))
        except UnusableTensor as error:
            raise UnusableTensor(f"tensor {i}: {error}") from error
    return arrays


def _vet(res: FitRes, reference: Sequence[Array], layers: LayerMap, requires: Mapping[str, Requirement]) -> list[Array]:
    """Return the client's arrays, or raise `UnusableTensor` with the reason why they cannot be used."""
    code = getattr(res.status, "code", Code.OK)
    if code is not Code.OK:
        raise UnusableTensor(f"status {code.name}: {res.status.message}")
    n = res.num_examples
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 0 < n < 2**63:
        shown = "beyond 64 bits" if isinstance(n, int) and abs(n) >= 2**63 else repr(n)
        raise UnusableTensor(f"num_examples is {shown}, must be a positive integer")
    for key, (usable, wanted) in requires.items():
        value = (res.metrics or {}).get(key)
        if not is_real(value) or not usable(value):
            raise UnusableTensor(f"its metrics hold {key}={value!r}, but this strategy needs {wanted} there")
    if len(res.parameters.tensors) != len(reference):
        raise UnusableTensor(f"{len(res.parameters.tensors)} tensors, the model has {len(reference)}")
    arrays = decode_all(res.parameters)
    for name, kind, array, expected in zip(layers.names, layers.kinds, arrays, reference, strict=True):
        if array.shape != expected.shape:
            raise UnusableTensor(f"tensor {name!r} has shape {array.shape}, the model's is {expected.shape}")
        wanted = "f" if kind != "counter" else "b" if expected.dtype.kind == "b" else "iu"
        if array.dtype.kind not in wanted:
            raise UnusableTensor(f"tensor {name!r} has dtype {array.dtype}, the model's is {expected.dtype}")
        if kind != "counter" and array.size and not _is_finite(array):
            raise UnusableTensor(f"tensor {name!r} holds NaN or Inf")
        if not _fits(array, expected.dtype):
            raise UnusableTensor(f"tensor {name!r} holds values too large for the model's {expected.dtype}")
    return arrays


def _fits(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Say whether an array's values can be held by `dtype` and, if they are real, squared in float64."""
    if array.size == 0 or dtype.kind == "b" or (array.dtype == dtype and dtype.itemsize <= 4):
        return True
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.can_cast(array.dtype, dtype) or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    largest = min(float(np.finfo(dtype).max), _LARGEST)
    if float(np.finfo(array.dtype).max) <= largest:
        return True
    return -largest <= float(array.min()) and float(array.max()) <= largest


class ClientUpdates:
    """The usable updates of one round, clients in canonical order.

    Attributes
    ----------
    clients : list of str
        Ids (`ClientProxy.cid`) of the m accepted clients.
    num_examples : list of int
    weights : Tensor, (m,), float64
        ρ_i = n_i / Σ n, on `device`.
    metrics : list of dict
        What each client reported (`FitRes.metrics`).
    rejected : list of Rejection
        Clients not used, in canonical order.
    layers : LayerMap
    device : torch.device
        Where blocks are handed out and solves run.
    """

    def __init__(
        self,
        results: Sequence[tuple[ClientProxy, FitRes]],
        global_arrays: Sequence[Array],
        layers: LayerMap,
        *,
        device: torch.device,
        order: OrderKey = client_order,
        requires: Mapping[str, Requirement] = MappingProxyType({}),
    ) -> None:
        self.layers = layers
        self.device = device
        self._global = global_arrays
        self.rejected: list[Rejection] = []
        accepted: dict[str, tuple[FitRes, list[Array]]] = {}
        for proxy, res in sorted(results, key=lambda pair: order(pair[0].cid)):
            try:
                with np.errstate(all="ignore"):
                    arrays = _vet(res, global_arrays, layers, requires)
            except UnusableTensor as error:
                self.rejected.append(Rejection(proxy.cid, str(error)))
                continue
            other = accepted.get(proxy.cid)
            if other is not None:
                self.rejected.append(Rejection(proxy.cid, "sent more than one result; one of them is used"))
                # Which one must not depend on the order of arrival.
                if _content(res) >= _content(other[0]):
                    continue
            accepted[proxy.cid] = (res, arrays)
        self.clients = list(accepted)
        self.num_examples = [int(res.num_examples) for res, _ in accepted.values()]
        self.metrics: list[dict[str, Scalar]] = [dict(res.metrics or {}) for res, _ in accepted.values()]
        self._arrays = [arrays for _, arrays in accepted.values()]
        total = sum(self.num_examples)
        shares = [n / total for n in self.num_examples]
        self.weights = torch.tensor(shares, dtype=torch.float64, device=device)
        # Clients by the dtypes they send. An update is taken from θ_t as such a client can hold it: a float32
        # client that returns a float64 model untouched has an update of zero, not of its rounding errors.
        self._senders: dict[tuple[np.dtype[np.generic], ...], list[int]] = {}
        for i, arrays in enumerate(self._arrays):
            self._senders.setdefault(tuple(a.dtype for a in arrays), []).append(i)
        # What blocks are put together in, for all layers: buffers of their own would fragment the heap. Float64
        # at once on the CPU; to another device the numbers travel in the clients' own precision.
        width = min(block_columns(len(self)), max((layer.size for layer in layers.layers), default=0))
        sent = {a.dtype for x in (global_arrays, *self._arrays) for a in x if a.dtype.kind == "f"}
        narrow = device.type != "cpu" and all(dtype.itemsize <= 4 for dtype in sent)
        self._stage = np.empty((len(self) + len(self._senders)) * width, np.float32 if narrow else np.float64)

    def __len__(self) -> int:
        return len(self.clients)

    def tensors(self, index: int) -> list[Array]:
        """Views of one tensor as each client sent it, for averaging buffers and counters."""
        return [arrays[index] for arrays in self._arrays]

    def blocks(self, layer: Layer) -> Iterator[tuple[slice, Tensor]]:
        """Yield the (m, d_q) matrix of updates of a layer in float64 column blocks, on `device`.

        All blocks, of whatever layer, share one buffer: each is overwritten by the next.
        """
        step = block_columns(len(self))
        pieces = []  # (tensor, its first column in the layer, its size)
        offset = 0
        for t in layer.tensors:
            size = self._global[t].size
            pieces.append((t, offset, size))
            offset += size
        flat = {t: [a[t].reshape(-1) for a in self._arrays] for t in layer.tensors}
        start = {t: self._global[t].reshape(-1) for t in layer.tensors}
        m, rows = len(self), len(self) + len(self._senders)
        for low in range(0, layer.size, step):
            high = min(low + step, layer.size)
            parts = [
                (t, slice(max(low, first) - first, min(high, first + size) - first))
                for t, first, size in pieces
                if max(low, first) < min(high, first + size)
            ]
            width = high - low
            stage = self._stage[: rows * width]

            def copy(first: int, last: int, parts: list[tuple[int, slice]] = parts, to: Any = stage) -> None:
                # One call copies and converts many rows; one each would cost more than the copying.
                pieces = [flat[t][i][source] for i in range(first, last) for t, source in parts]
                np.concatenate(pieces, out=to[first * len(to) // rows : last * len(to) // rows])

            if m < 2 or len(stage) < _PARALLEL:
                copy(0, m)
            else:  # NumPy copies without holding the interpreter
                list(_copiers().map(copy, (0, m // 2), (m // 2, m)))
            originals = [start[t][source].astype(d[t], copy=False) for d in self._senders for t, source in parts]
            np.concatenate(originals, out=stage[m * width :])
            values = torch.from_numpy(stage).to(self.device, torch.float64).view(rows, high - low)
            block, bases = values[:m], values[m:]
            if len(bases) == 1:
                block.sub_(bases[0])
            else:
                for base, senders in zip(bases, self._senders.values(), strict=True):
                    block[senders] -= base
            yield slice(low, high), block

    def layer(self, name: str | int | Layer) -> Tensor:
        """Return the updates g_i = θ_i − θ_t of one layer, (m, d_q), float64, on `device`.

        Raises
        ------
        KeyError
            If there is no such layer.
        """
        layer = self._find(name)
        out = torch.empty((len(self), layer.size), dtype=torch.float64, device=self.device)
        for columns, block in self.blocks(layer):
            out[:, columns] = block
        return out

    def reported(self, key: str) -> Tensor:
        """Return a metric every client had to report, (m,), float64, on `device`."""
        return torch.tensor([float(m[key]) for m in self.metrics], dtype=torch.float64, device=self.device)

    def gram(self, layer: Layer, reference: Tensor | None = None) -> Gram:
        """Inner products of a layer's updates, and of each with `reference`, (d_q,), or several, (h, d_q)."""
        return gram(self.blocks(layer), len(self), reference, device=self.device)

    def whole_gram(self) -> Tensor:
        """Inner products ⟨g_i, g_j⟩ of the updates over all layers: (m, m), float64."""
        total = torch.zeros((len(self), len(self)), dtype=torch.float64, device=self.device)
        for layer in self.layers.layers:
            total += self.gram(layer).matrix
        return total

    def squared_norms(self) -> Tensor:
        """‖g_i‖² over all layers: (m,), float64; much cheaper than `whole_gram`."""
        total = torch.zeros(len(self), dtype=torch.float64, device=self.device)
        for layer in self.layers.layers:
            for _, block in self.blocks(layer):
                total += torch.linalg.vector_norm(block, dim=1).square_()
        return total

    def measure(self, layer: Layer, vector: Tensor) -> LayerDirection:
        """Return any vector, (d_q,), as the direction of a layer, with its inner products."""
        return self.combine(layer, torch.zeros_like(self.weights), vector)

    def combine(
        self, layer: Layer, coefficients: Tensor, reference: Tensor | None = None, reference_weight: float = 1.0
    ) -> LayerDirection:
        """Form reference_weight·reference + Σ coefficients_i g_i for a layer, in one read of its updates.

        Parameters
        ----------
        coefficients : Tensor, (m,), float64
        reference : Tensor, (d_q,), float64, optional
        """
        alpha = torch.stack([coefficients, self.weights])
        beta = torch.tensor([reference_weight, 0.0], dtype=torch.float64, device=self.device)
        # The mean's products are wanted, the mean itself is not: only the first combination is kept.
        found = combine(self.blocks(layer), alpha, layer.size, reference, beta, keep=1)
        return LayerDirection(found.vectors[0], found.products[0], found.products[1], found.squared_norms)

    def _find(self, name: str | int | Layer) -> Layer:
        if isinstance(name, Layer):
            return name
        if isinstance(name, int):
            return self.layers.layers[name]
        for layer in self.layers.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"there is no layer {name!r}; the layers are {', '.join(x.name for x in self.layers.layers)}.")


def _content(res: FitRes) -> tuple[int, list[bytes], str]:
    """Return what a result says, comparable and the same however its tensors are held."""
    tensors = [ndarray_to_bytes(t) if _is_decoded(t) else bytes(t) for t in res.parameters.tensors]
    return int(res.num_examples), tensors, repr(sorted((res.metrics or {}).items()))
