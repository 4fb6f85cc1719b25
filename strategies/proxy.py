"""ProxyLikelihood: the gradient of a loss on data that the server owns, for FedRef's fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .model import GlobalModel
from .updates import Array

Gradient = Callable[[Tensor], Tensor]


class ProxyLikelihood:
    """A model, batches, and a loss.

    Parameters
    ----------
    model : torch.nn.Module
        Overwritten; its state_dict has the global model's tensors, in their order.
    data : iterable
        Batches, iterated anew in every round.
    loss : callable
        loss(model, batch) returns a differentiable scalar.

    Raises
    ------
    ValueError
        If one is missing or of another kind.
    """

    def __init__(
        self, model: nn.Module | None, data: Iterable[Any] | None, loss: Callable[[nn.Module, Any], Tensor] | None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"proxy_model={model!r} must be a torch.nn.Module with likelihood='proxy'.")
        if not isinstance(data, Iterable) or isinstance(data, Iterator):
            raise ValueError(
                f"proxy_data={data!r} must be batches that can be iterated anew each round, such as a DataLoader or a "
                "list, with likelihood='proxy'."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("proxy_model has no parameter that requires a gradient; do not freeze all of it.")
        if not callable(loss):
            raise ValueError(f"proxy_loss={loss!r} must be a function of (model, batch) with likelihood='proxy'.")
        self._model = model
        self._data = data
        self._loss = loss

    @contextmanager
    def likelihood(self, model: GlobalModel, merged: Mapping[int, Array], *, seed: int) -> Iterator[Gradient]:
        """Give ∇F as a function of all layers' numbers, one after the other; each call takes the next batch.

        Inside, torch's global generators are seeded, so that a DataLoader that shuffles and dropout repeat in a resumed
        run; they are as before afterwards.

        Parameters
        ----------
        model : GlobalModel
        merged : mapping of int to ndarray
            Buffers and counters of the next global model, by position.
        seed : int

        Raises
        ------
        ValueError
            If the proxy model's tensors are not the global model's, the data has no batch, or the loss is no
            differentiable scalar.
        ArithmeticError
            At the end, if a loss was not finite.
        """
        targets = self.check(model)
        layers = model.layers.layers
        trained = [targets[t] for layer in layers for t in layer.tensors]
        with torch.no_grad():
            for t, value in merged.items():
                targets[t].copy_(torch.tensor(np.asarray(value)))
        batches = self._batches()
        losses: list[Tensor] = []

        def gradient(theta: Tensor) -> Tensor:
            with torch.no_grad():
                for target, part in zip(trained, torch.split(theta, [p.numel() for p in trained]), strict=True):
                    target.copy_(part.view(target.shape))
            wanted = [target for target in trained if target.requires_grad]
            with torch.enable_grad():
                loss = self._loss(self._model, next(batches))
                if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
                    raise ValueError("proxy_loss must return a differentiable scalar tensor.")
                losses.append(loss.detach())
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
            of = {id(target): g for target, g in zip(wanted, found, strict=True)}
            parts = [_flat(of.get(id(target)), target) for target in trained]
            return torch.cat(parts).to(theta.device)

        devices = sorted({target.device.index or 0 for target in targets if target.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield gradient
        if losses and not bool(torch.stack(losses).isfinite().all()):  # asked once: a GPU need not wait in between
            found = next(loss for loss in losses if not bool(loss.isfinite()))
            raise ArithmeticError(f"proxy_loss is {found.item()}; look at proxy_data, or lower server_lr")

    def check(self, model: GlobalModel) -> list[Tensor]:
        """Return the proxy model's tensors, or raise ValueError if they are not of the global model's shapes."""
        state = self._model.state_dict(keep_vars=True)
        theirs, ours = [tuple(t.shape) for t in state.values()], [a.shape for a in model.arrays]
        if theirs != ours:
            where = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            what = f"{len(theirs)} tensors" if where is None else f"shape {theirs[where]} at position {where}"
            wanted = len(ours) if where is None else ours[where]
            raise ValueError(f"proxy_model has {what} where the global model has {wanted}; pass a model of its kind.")
        return list(state.values())

    def _batches(self) -> Iterator[Any]:
        while True:
            empty = True
            for batch in self._data:
                empty = False
                yield batch
            if empty:
                raise ValueError("proxy_data gave no batch; pass what can be iterated anew each round: a DataLoader.")


def _flat(gradient: Tensor | None, target: Tensor) -> Tensor:
    """Return a gradient as float64 numbers in a row; zeros where the loss does not depend on the tensor."""
    flat = torch.zeros_like(target) if gradient is None else gradient
    return flat.detach().reshape(-1).to(torch.float64)
