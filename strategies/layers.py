"""LayerMap: the model's tensors, grouped into the layers a solve works on and split by what they are.

A strategy sees a model as an ordered list of arrays. This file says which of them are *trainable* (they
enter a solve), which are *buffers* (running statistics: averaged, never solved for) and which are *counters*
(integers: the maximum is taken), and which trainable tensors form one layer. CRAFT's layer is a module:
weight and bias together, and a normalisation layer joins the layer before it (METHODS of CRAFT,
arXiv 2605.21317; a ResNet-20 with GroupNorm has 20 layers).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

Kind = Literal["trainable", "buffer", "counter"]

_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm, every dimension, and SyncBatchNorm
    nn.GroupNorm,
    nn.LayerNorm,
    *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []),
)
# Names torch gives to running statistics; all other non-integer tensors of a name list are trainable.
_BUFFER_NAMES = ("running_mean", "running_var")
_COUNTER_NAMES = ("num_batches_tracked",)


@dataclass(frozen=True)
class Layer:
    """A group of trainable tensors that one solve treats as a single vector.

    Attributes
    ----------
    name : str
        The module that opens the group (`"conv1"`), or the tensor's own name.
    tensors : tuple of int
        Positions of its tensors in the model's list of arrays, ascending.
    size : int
        d_q, the number of scalars in the group.
    """

    name: str
    tensors: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class LayerMap:
    """What each tensor of a model is, and which trainable tensors form a layer.

    Attributes
    ----------
    names : tuple of str
        One name per tensor, in the order in which arrays are exchanged.
    shapes : tuple of tuple of int
        One shape per tensor; `()` for a 0-d tensor.
    kinds : tuple of {"trainable", "buffer", "counter"}
        What each tensor is.
    layers : tuple of Layer
        The groups, in model order; every trainable tensor is in exactly one.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[Kind, ...]
    layers: tuple[Layer, ...]

    @classmethod
    def from_module(cls, module: nn.Module) -> LayerMap:
        """Group the tensors of `module.state_dict()`, in its order.

        Parameters of one submodule form a layer. Those of a normalisation module (BatchNorm, InstanceNorm,
        GroupNorm, LayerNorm, RMSNorm), and of any submodule that has only scalars and vectors, join the layer
        registered before it. Parameters that do not require
        a gradient, and floating-point buffers, are buffers; integer and boolean tensors are counters.
        Parameters shared between modules (tied weights) appear in the `state_dict` more than once; the
        later ones join the layer of the first, so that one solve moves them together.

        Raises
        ------
        ValueError
            If the module has no tensors, or one that is not real.
        """
        owner: dict[int, str] = {}  # by identity: wrappers may rename what they hold
        norms: set[str] = set()
        for prefix, child in module.named_modules():
            own = [p for p in child._parameters.values() if p is not None]
            for parameter in own:
                owner.setdefault(id(parameter), prefix)
            if isinstance(child, _NORMS) or (prefix and own and all(p.ndim <= 1 for p in own)):
                norms.add(prefix)
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        kinds: list[Kind] = []
        groups: list[str | None] = []
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
                what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(f"state_dict entry {name!r} is {what}; LayerMap needs real tensors only.")
            trainable = tensor.is_floating_point() and tensor.requires_grad
            if trainable and id(tensor) not in owner:
                raise ValueError(
                    f"state_dict entry {name!r} is trained but belongs to no submodule; build the map by from_names."
                )
            names.append(name)
            shapes.append(tuple(tensor.shape))
            kinds.append("trainable" if trainable else "buffer" if tensor.is_floating_point() else "counter")
            groups.append(owner[id(tensor)] if trainable else None)
        return cls._build(names, shapes, kinds, groups, norms)

    @classmethod
    def from_names(cls, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> LayerMap:
        """Group by dotted tensor names, as in a PyTorch `state_dict`, when no module is at hand.

        The part before the last dot is the module. A module all of whose trainable tensors have at most
        one dimension is taken for a normalisation layer and joins the layer before it.
        `running_mean` and `running_var` are buffers, `num_batches_tracked` a counter. Whether any other
        tensor is an integer cannot be read off a name; strategies treat every integer array as a counter.

        Raises
        ------
        ValueError
            If `names` and `shapes` differ in length, or a name occurs twice.
        """
        if len(names) != len(shapes):
            raise ValueError(
                f"LayerMap.from_names got {len(names)} names but {len(shapes)} shapes; give one shape per name."
            )
        kinds: list[Kind] = []
        groups: list[str | None] = []
        widest: dict[str, int] = {}
        for name, shape in zip(names, shapes, strict=True):
            module, _, leaf = name.rpartition(".")
            if leaf in _COUNTER_NAMES:
                kinds.append("counter")
            elif leaf in _BUFFER_NAMES:
                kinds.append("buffer")
            else:
                kinds.append("trainable")
                # A bare name without a dot has no module: it is a layer of its own, told apart by the colon.
                group = module if module else f":{name}"
                widest[group] = max(widest.get(group, 0), len(shape))
                groups.append(group)
                continue
            groups.append(None)
        norms = {group for group, ndim in widest.items() if ndim <= 1 and not group.startswith(":")}
        return cls._build(list(names), [tuple(int(n) for n in s) for s in shapes], kinds, groups, norms)

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray], names: Sequence[str] | None = None) -> LayerMap:
        """Make every floating-point array its own layer and every integer or boolean array a counter.

        This is what a strategy uses when it is given `layers=None`. Without `names`, tensors are called tensor0,
        tensor1, ...

        Raises
        ------
        ValueError
            If there is no array, a name occurs twice, or there are more or fewer names than arrays.
        """
        names = [f"tensor{i}" for i in range(len(arrays))] if names is None else list(names)
        if len(names) != len(arrays):
            raise ValueError(
                f"LayerMap.from_arrays got {len(names)} names but {len(arrays)} arrays; give one name each."
            )
        kinds: list[Kind] = ["trainable" if a.dtype.kind == "f" else "counter" for a in arrays]
        groups = [n if k == "trainable" else None for n, k in zip(names, kinds, strict=True)]
        return cls._build(names, [a.shape for a in arrays], kinds, groups, set())

    def for_arrays(self, arrays: Sequence[np.ndarray]) -> LayerMap:
        """Check that this map describes `arrays`; integer arrays become counters, floating-point counters buffers.

        Raises
        ------
        ValueError
            If the number of arrays or a shape differs; the sentence names the first tensor that does.
        """
        if len(arrays) != len(self.names):
            raise ValueError(
                f"the LayerMap describes {len(self.names)} tensors but the global model has "
                f"{len(arrays)}; build it from the module whose parameters are exchanged."
            )
        kinds: list[Kind] = []
        for name, shape, kind, array in zip(self.names, self.shapes, self.kinds, arrays, strict=True):
            if tuple(array.shape) != shape:
                raise ValueError(
                    f"the LayerMap gives {name!r} the shape {shape} but the global model has "
                    f"{tuple(array.shape)}; build it from the module whose parameters are exchanged."
                )
            # Averaging turns counters into floats; such a model's counters are averaged from then on.
            real: Kind = "buffer" if kind == "counter" else kind
            kinds.append(real if array.dtype.kind == "f" else "counter")
        if kinds == list(self.kinds):
            return self
        layers = []
        for layer in self.layers:
            kept = tuple(i for i in layer.tensors if kinds[i] == "trainable")
            if kept:
                layers.append(Layer(layer.name, kept, sum(math.prod(self.shapes[i]) for i in kept)))
        return LayerMap(self.names, self.shapes, tuple(kinds), tuple(layers))

    @property
    def size(self) -> int:
        """d, the number of trainable scalars."""
        return sum(layer.size for layer in self.layers)

    def indices(self, kind: Kind) -> list[int]:
        """Positions of the tensors of one kind, ascending."""
        return [i for i, k in enumerate(self.kinds) if k == kind]

    @classmethod
    def _build(
        cls,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        kinds: Sequence[Kind],
        groups: Iterable[str | None],
        norms: set[str],
    ) -> LayerMap:
        """Collect tensors into groups; a group in `norms` is appended to the group opened before it."""
        if not names:
            raise ValueError("a LayerMap needs at least one tensor; the model has none.")
        if len(set(names)) != len(names):
            twice = next(n for n in names if list(names).count(n) > 1)
            raise ValueError(f"tensor name {twice!r} occurs twice; names in a LayerMap must be unique.")
        members: dict[str, list[int]] = {}
        joined: dict[str, str] = {}
        previous: str | None = None
        for i, group in enumerate(groups):
            if group is None:
                continue
            if group in norms and previous is not None and group not in members:
                joined.setdefault(group, previous)
            target = joined.get(group, group)
            members.setdefault(target, []).append(i)
            previous = target
        layers = tuple(
            Layer(
                names[tensors[0]] if name.startswith(":") or not name else name,
                tuple(sorted(tensors)),
                sum(math.prod(shapes[i]) for i in tensors),
            )
            for name, tensors in members.items()
        )
        return cls(tuple(names), tuple(shapes), tuple(kinds), layers)
