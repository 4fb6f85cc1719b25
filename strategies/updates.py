"""ClientUpdates: what the clients sent in a round, vetted, in canonical order, read without copies.

`FitRes.parameters.tensors` are `.npy` byte strings, or memory that an engine lends for the round. They are
parsed, never unpickled, viewed in place and never written to; an update g_i = θ_i − θ_t exists only a block
of columns at a time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import Code, EvaluateRes, FitRes, Parameters, Scalar, ndarray_to_bytes
from flwr.server.client_proxy import ClientProxy
from torch import Tensor

from .clipping import MedianClip
from .gram import Gram, block_columns, combine, gram
from .layers import Layer, LayerMap
from .options import is_real
from .shares import capped_shares, limited

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12

Array = npt.NDArray[np.generic]
OrderKey = Callable[[str], tuple[int, int, str]]
"""Maps a client id to what clients are sorted by."""
Requirement = tuple[Callable[[float], bool], str]
"""Whether a metric's value can be used, and what is wanted, in words."""


# Numbers above this cannot be squared and summed in float64.
_LARGEST = 1e150
_MAX_DIMENSIONS = 32
_MAGIC = b"\x93NUMPY"
# An entry of a header (NEP 1), and its values. NumPy's own parser takes any Python literal, recurses on it and warns;
# no array of numbers needs that.
_VALUE = r"""'[^'"\\]*'|"[^'"\\]*"|True|False|\([0-9, ]*\)"""
_ENTRY = re.compile(rf""" *(["'])(descr|fortran_order|shape)\1 *: *({_VALUE}) *(?:,|(?=\}}))""")
_DTYPE = re.compile(r"[<>|=]?[fiub?cmMOSUV][0-9]{0,4}")
_SHAPE = re.compile(r"\((?: *(?:0|[1-9][0-9]{0,14}) *,)*(?: *(?:0|[1-9][0-9]{0,14}))? *\)")
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
    # Nor may it move a terminal's cursor, or hold what no file can be written with.
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= _REASON else f"{line[: _REASON // 3]} ... {line[-_REASON // 2 :]}"


def shown(value: object) -> str:
    """Return what a client sent as text for a reason, of bounded length, whatever it is."""
    try:
        return one_line(repr(value[:_REASON] if isinstance(value, str | bytes) else value))
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists
        return f"a {type(value).__name__} that cannot be shown"


def client_order(cid: str) -> tuple[int, int, str]:
    """Sort key of a client id: numbers by value, then everything else alphabetically."""
    text = str(cid)
    return (0, int(text), text) if re.fullmatch(r"-?[0-9]{1,40}", text) else (1, 0, text)


@functools.lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Parse the header of a `.npy` file; equal headers recur for every client, so they are parsed once."""
    unreadable = UnusableTensor("its .npy header cannot be read")
    text = header[_header_at(header) :].decode("latin1")
    entries: dict[str, str] = {}
    end = 1
    while found := _ENTRY.match(text, end):
        if found[2] in entries:
            break
        entries[found[2]] = found[3]
        end = found.end()
    if text[:1] != "{" or len(entries) != 3 or not re.fullmatch(r" *\} *\n?", text[end:]):
        raise unreadable
    descr, order, shape = entries["descr"][1:-1], entries["fortran_order"], entries["shape"]
    lengths = tuple(int(n) for n in re.findall("[0-9]+", shape))
    is_tuple = _SHAPE.fullmatch(shape) and (len(lengths) != 1 or "," in shape)
    if not is_tuple or order not in ("True", "False") or entries["descr"][0] not in "'\"":
        raise unreadable
    if not _DTYPE.fullmatch(descr):
        raise UnusableTensor(f"dtype {one_line(descr)!r} is not a number of at most 64 bits")
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError) as error:
        raise unreadable from error
    return lengths, order == "True", dtype


def _header_at(start: bytes) -> int:
    """Where a header begins: behind the magic string, the version, and its length in 2 bytes, from version 2 in 4."""
    return 12 if start[6] > 1 else 10


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
    if prefix[6:8] not in (b"\1\0", b"\2\0"):  # version 3 is for names of fields, which no array of numbers has
        raise UnusableTensor(f"its .npy format is of version {prefix[6]}.{prefix[7]}")
    low = _header_at(prefix)
    start = low + int.from_bytes(prefix[8:low], "little")
    if start > min(len(data), 4096):
        raise UnusableTensor("its .npy header is longer than the data or than 4096 bytes")
    shape, fortran, dtype = _parse_header(bytes(data[:start]))
    _require_number(dtype)
    if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) >= 2**48:
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
    # In the machine's own byte order, whatever that of the array.
    total = np.add.reduce(array, axis=None, dtype=np.float64 if array.dtype.itemsize > 4 else np.float32)
    # A finite sum proves it; a sum may also overflow over finite values, and only then each is looked at.
    return math.isfinite(total) or bool(np.isfinite(array).all())


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "copy")


def decode_all(parameters: Parameters, names: Sequence[str] | None = None) -> list[Array]:
    """Decode every tensor of a Flower `Parameters`, as views.

    Raises
    ------
    UnusableTensor
        Naming the first tensor that cannot be read, or its position.
    """
    arrays = []
    for i, data in enumerate(parameters.tensors):
        try:
            arrays.append(decode(data))
        except UnusableTensor as error:
            raise UnusableTensor(f"tensor {i if names is None else repr(names[i])}: {error}") from error
    return arrays


def check_report(res: FitRes | EvaluateRes) -> None:
    """Raise `UnusableTensor` with the reason if a result's status, number of examples or metrics cannot be used."""
    code = getattr(res.status, "code", Code.OK)
    if code is not Code.OK:
        raise UnusableTensor(status_text(res))
    n = res.num_examples
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 0 < n < 2**63:
        text = "beyond 64 bits" if isinstance(n, int) and abs(n) >= 2**63 else shown(n)
        raise UnusableTensor(f"num_examples is {text}, must be a positive integer")
    if not isinstance(res.metrics, Mapping | None):
        raise UnusableTensor(f"its metrics are a {type(res.metrics).__name__}, not a mapping")


def status_text(res: FitRes | EvaluateRes) -> str:
    """Return what a result's status says, whatever it is."""
    code, message = getattr(res.status, "code", None), getattr(res.status, "message", "")
    name = code.name if isinstance(code, Code) else shown(code)
    return f"status {name}: {one_line(message) if isinstance(message, str) else shown(message)}"


class _Vetting:
    """What a client's result is checked against."""

    def __init__(self, reference: Sequence[Array], layers: LayerMap, requires: Mapping[str, Requirement]) -> None:
        self._reference = reference
        self._layers = layers
        self._requires = requires
        self._held: dict[tuple[int, np.dtype[np.generic]], bool] = {}

    def arrays(self, res: FitRes) -> list[Array]:
        """Return the client's arrays, or raise `UnusableTensor` with the reason why they cannot be used."""
        check_report(res)
        for key, (usable, wanted) in self._requires.items():
            value = (res.metrics or {}).get(key)
            if not is_real(value) or not usable(value):
                raise UnusableTensor(f"its metrics hold {key}={shown(value)}, but this strategy needs {wanted} there")
        tensors = getattr(res.parameters, "tensors", None)
        if not isinstance(tensors, list | tuple):
            raise UnusableTensor("it holds no list of tensors")
        if len(tensors) != len(self._reference):  # before any is looked at
            raise UnusableTensor(f"{len(tensors)} tensors, the model has {len(self._reference)}")
        arrays = decode_all(res.parameters, self._layers.names)
        for t, array in enumerate(arrays):
            self._check(t, array)
        return arrays

    def _check(self, t: int, array: Array) -> None:
        name, kind, expected = self._layers.names[t], self._layers.kinds[t], self._reference[t]
        if array.shape != expected.shape:
            raise UnusableTensor(f"tensor {name!r} has shape {array.shape}, the model's is {expected.shape}")
        wanted = "f" if kind != "counter" else "b" if expected.dtype.kind == "b" else "iu"
        if array.dtype.kind not in wanted:
            raise UnusableTensor(f"tensor {name!r} has dtype {array.dtype}, the model's is {expected.dtype}")
        if kind != "counter" and array.size and not _is_finite(array):
            raise UnusableTensor(f"tensor {name!r} holds NaN or Inf")
        if not _fits(array, expected.dtype):
            raise UnusableTensor(f"tensor {name!r} holds values too large for the model's {expected.dtype}")
        # An update is taken from θ_t in the client's dtype, which has to hold it.
        if kind != "counter" and not self._holds(t, array.dtype):
            raise UnusableTensor(f"tensor {name!r} has dtype {array.dtype}, too small for the model's values")

    def _holds(self, t: int, dtype: np.dtype[np.generic]) -> bool:
        if dtype.itemsize >= self._reference[t].dtype.itemsize:
            return True
        if (t, dtype) not in self._held:
            self._held[t, dtype] = _fits(self._reference[t], dtype)
        return self._held[t, dtype]


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
        As they said; what that counts are the `weights`.
    weights : Tensor, (m,), float64
        ρ_i = n_i / Σ n, on `device`; none above `max_weight_share`, see `UpdateStrategy`.
    capped : list of str
        Clients that count less than they said.
    clipped : dict of str to str
        Clients of which something was clipped, and what.
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
        max_weight_share: float | None = None,
        clip_to_median: float | None = None,
    ) -> None:
        self.layers = layers
        self.device = device
        self.max_weight_share = max_weight_share
        self._global = global_arrays
        self.rejected: list[Rejection] = []
        accepted: dict[str, tuple[FitRes, list[Array]]] = {}
        vetting = _Vetting(global_arrays, layers, requires)
        for proxy, res in sorted(results, key=lambda pair: order(pair[0].cid)):
            try:
                with np.errstate(all="ignore"):
                    arrays = vetting.arrays(res)
            except UnusableTensor as error:
                self.rejected.append(Rejection(proxy.cid, one_line(str(error))))
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
        shares, capped = capped_shares(self.num_examples, max_weight_share)
        self.weights = torch.tensor(shares, dtype=torch.float64, device=device)
        self.capped = [self.clients[i] for i in capped]
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
        self._clip: MedianClip | None = None
        self.clipped: dict[str, str] = {}
        if clip_to_median is not None and self.clients:
            self._clip = MedianClip(clip_to_median, layers, global_arrays, self._arrays, self._lengths())
            self.clipped = {self.clients[i]: note for i, note in sorted(self._clip.notes.items())}

    def __len__(self) -> int:
        return len(self.clients)

    def tensors(self, index: int) -> list[Array]:
        """One tensor as each client sent it, for averaging buffers and counters: views, but for what is clipped."""
        sent = [arrays[index] for arrays in self._arrays]
        return sent if self._clip is None else self._clip.tensors(index, sent)

    @property
    def largest_share(self) -> float:
        """The largest weight that any client may have: `max_weight_share`, or 1/m where that is more; 1 without it."""
        return 1.0 if self.max_weight_share is None else max(self.max_weight_share, 1 / max(len(self), 1))

    def limited(self, sizes: Tensor, among: Tensor | None = None) -> Tensor:
        """Return what clients count, (m,), with nobody's part of the sum above `max_weight_share`.

        For a method that weights clients by more than their `weights`. Where the option is off, or nobody is above it,
        `sizes` come back as they are. `among`, (m,), bool: the clients that count at all; the sizes of others are 0.
        """
        return limited(sizes, self.max_weight_share, among)

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
            if self._clip is not None and self._clip.factors is not None:
                block.mul_(self._clip.factors)
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

    def _lengths(self) -> Tensor:
        """‖g_i‖ over all layers, (m,), float64, also where it cannot be squared."""
        total = torch.zeros(len(self), dtype=torch.float64, device=self.device)
        for layer in self.layers.layers:
            for _, block in self.blocks(layer):
                total = torch.hypot(total, torch.linalg.vector_norm(block, dim=1))
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


def _content(res: FitRes) -> tuple[int, list[bytes], list[tuple[str, str]]]:
    """Return what a result says, comparable and the same however its tensors are held."""
    tensors = [ndarray_to_bytes(t) if _is_decoded(t) else bytes(t) for t in res.parameters.tensors]
    return int(res.num_examples), tensors, sorted((_written(k), _written(v)) for k, v in (res.metrics or {}).items())


def _written(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return shown(value)
