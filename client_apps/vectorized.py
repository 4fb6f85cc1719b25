"""Local training of many clients at once: their models stacked along a first axis, one step for all.

Clients never meet: every operation acts on each client's slice alone, and nothing is padded. In a chain of linear
layers and activations (`StackedLinearNetwork`) on a CPU with one thread, a client's result is the same, bit for bit,
whatever group it is trained in. Other models go through torch.func, whose kernels may round by the group's size and a
slice's place in memory; there results agree within float tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from client_apps.stacked_linear import StackedLinearNetwork, empty_stack
from client_apps.training import SGD, TrainResult, has_batch_norm, sgd_step, step_weight

T = TypeVar("T")

STACK_BYTES = 32 * 2**20
"""Largest stack of models; beyond, the processor's caches are long full and only memory is used."""


class Work(NamedTuple):
    """One client's share of a group.

    Parameters
    ----------
    images : Tensor of uint8, shape (n, c, h, w), n >= 1
    labels : Tensor of int64, shape (n,)
    seed : int
        Decides order and augmentation.
    start : sequence of Tensor, optional
        The client's own model to start from, in state_dict order; by default the one that all got.
    """

    images: Tensor
    labels: Tensor
    seed: int
    start: Sequence[Tensor] | None = None


class Step(Protocol):
    """One SGD step of stacked models."""

    def __call__(
        self,
        state: list[Tensor],
        velocity: list[Tensor],
        pull: list[Tensor],
        images: Tensor,
        labels: Tensor,
        first: bool,
        sgd: SGD,
    ) -> Tensor:
        """Step each client's model along the gradient of its own mean cross-entropy and of the proximal term.

        Parameters
        ----------
        state : list of Tensor
            One tensor of shape (k, ...) for each state_dict entry of the model; changed in place.
        velocity : list of Tensor
            One for each trained parameter, in state_dict order; changed in place. Empty without momentum.
        pull : list of Tensor
            `SGD.pull` of the model that all clients are pulled to: one for each trained parameter, without the
            clients' axis. Empty without a proximal term.
        images : Tensor, shape (k, b, c, h, w)
            Network input.
        labels : Tensor of int64, shape (k, b)
        first : bool
            Whether this is these clients' first step: velocity holds nothing yet.
        sgd : SGD

        Returns
        -------
        Tensor, shape (k,)
            The losses before the step.
        """


class VectorizedTraining:
    """SGD on groups of clients that start from the same model, or are pulled to it.

    The stacks are kept: fresh ones of this size cost more page faults than a step costs arithmetic.

    Parameters
    ----------
    model : nn.Module
        Gives architecture, dtypes and device; its weights are not used. It must have no `obstacle`.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        trained = [i for i, name in enumerate(state) if name in trainable]
        self.capacity = max(1, STACK_BYTES // max(1, sum(tensor.nbytes for tensor in state.values())))
        self._state = [empty_stack(self.capacity, tensor.shape, tensor) for tensor in state.values()]
        # Without momentum this memory is never touched, and so never taken from the machine.
        self._velocity = [empty_stack(self.capacity, self._state[i].shape[1:], self._state[i]) for i in trained]
        self._trained = trained
        self._step: Step = StackedLinearNetwork.of(model) or _General(model, trained)

    def train(
        self,
        state: Sequence[Tensor],
        clients: Sequence[Work],
        take: Callable[[list[Tensor]], T],
        *,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None,
        normalise: Callable[[Tensor], Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        epochs: int,
        batch_size: int,
        proximal_mu: float = 0.0,
    ) -> list[tuple[T, TrainResult]]:
        """Train a copy of the model for each client, as `client_apps.training.local_sgd` does.

        Parameters
        ----------
        state : sequence of Tensor
            The model a client starts from unless it has a start of its own, and which a proximal term pulls all
            to, in state_dict order; not changed.
        clients : sequence of Work
            On the model's device.
        take : Callable
            Called once for each client with its trained tensors in state_dict order. They are views of memory
            that is used again: it must copy what it keeps.
        augment : Callable or None
            Turns uint8 images of one client into others with that client's CPU generator.
        normalise : Callable
            Turns uint8 images of shape (k, b, c, h, w) into network input, each pixel by itself.
        lr, momentum, weight_decay, epochs, batch_size, proximal_mu
            As in `local_sgd`.

        Returns
        -------
        list
            For each client, in the order given, what `take` returned, and its TrainResult.
        """
        # Largest first: the clients that still have a full batch are then a prefix, a view without a copy.
        order = sorted(range(len(clients)), key=lambda i: -len(clients[i].labels))
        sgd = SGD(lr, momentum, weight_decay, proximal_mu)
        pull = sgd.pull([state[i].to(self._state[i].device) for i in self._trained])
        taken: dict[int, tuple[T, TrainResult]] = {}
        for start in range(0, len(order), self.capacity):
            members = order[start : start + self.capacity]
            stacks = [stack[: len(members)] for stack in self._state]
            for stack, tensor in zip(stacks, state, strict=True):
                stack.copy_(tensor.detach())
            for row, i in enumerate(members):
                if (own := clients[i].start) is not None:
                    for stack, tensor in zip(stacks, own, strict=True):
                        stack[row].copy_(tensor.detach())
            results = self._train_group(
                stacks, [clients[i] for i in members], pull, augment, normalise, sgd, epochs, batch_size
            )
            for row, (i, result) in enumerate(zip(members, results, strict=True)):
                taken[i] = take([stack[row] for stack in stacks]), result
        return [taken[i] for i in range(len(clients))]

    def _train_group(
        self,
        stacks: Sequence[Tensor],
        clients: Sequence[Work],
        pull: list[Tensor],
        augment: Callable[[Tensor, torch.Generator], Tensor] | None,
        normalise: Callable[[Tensor], Tensor],
        sgd: SGD,
        epochs: int,
        batch_size: int,
    ) -> list[TrainResult]:
        """Train clients of falling size, whose models fill the stacks."""
        images = torch.cat([client.images for client in clients])
        labels = torch.cat([client.labels for client in clients])
        generators = [torch.Generator().manual_seed(client.seed) for client in clients]
        sizes = [len(client.labels) for client in clients]
        offsets = torch.tensor([[end - size] for size, end in zip(sizes, accumulate(sizes), strict=True)])
        batches = [
            (start, stop, low, high, [stack[start:stop] for stack in stacks], self._velocities(start, stop, sgd))
            for start, stop, low, high in _schedule(sizes, batch_size)
        ]
        losses = torch.zeros(len(sizes), dtype=torch.float64, device=labels.device)
        rows = torch.zeros(len(sizes), sizes[0], dtype=torch.int64)
        for epoch in range(epochs):
            for row, size, generator in zip(rows, sizes, generators, strict=True):
                torch.randperm(size, generator=generator, out=row[:size])
            positions = (rows + offsets).to(labels.device)
            for start, stop, low, high, state, velocity in batches:
                batch = positions[start:stop, low:high]
                pixels = images[batch]
                if augment is not None:
                    pixels = torch.stack([augment(pixels[i - start], generators[i]) for i in range(start, stop)])
                first = epoch == 0 and low == 0
                loss = self._step(state, velocity, pull, normalise(pixels), labels[batch], first, sgd)
                losses[start:stop] += loss * (high - low)
        results = []
        for size, loss_sum in zip(sizes, losses.tolist(), strict=True):
            steps = epochs * -(-size // batch_size)
            results.append(TrainResult(size, loss_sum / (epochs * size), steps, step_weight(steps, sgd)))
        return results

    def _velocities(self, start: int, stop: int, sgd: SGD) -> list[Tensor]:
        return [velocity[start:stop] for velocity in self._velocity] if sgd.momentum else []


def _schedule(sizes: Sequence[int], batch_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the batches of an epoch as (first client, end, first sample, end), for falling sizes.

    The clients of a batch have it at the same place and of the same length. As sizes fall, those with a full
    batch come first, and those whose last, shorter batches are equal follow side by side.
    """
    for low in range(0, sizes[0], batch_size):
        high = low + batch_size
        start = sum(size >= high for size in sizes)
        if start:
            yield 0, start, low, high
        while start < len(sizes) and sizes[start] > low:
            stop = start + sizes[start:].count(sizes[start])
            yield start, stop, low, sizes[start]
            start = stop


class _General:
    """The step of any model without an `obstacle`, by torch.func."""

    def __init__(self, model: nn.Module, trained: Sequence[int]) -> None:
        names = list(model.state_dict())
        fixed = [i for i in range(len(names)) if i not in trained]

        def loss(parameters: list[Tensor], others: list[Tensor], images: Tensor, labels: Tensor) -> Tensor:
            state = {names[i]: tensor for i, tensor in zip([*trained, *fixed], [*parameters, *others], strict=True)}
            return F.cross_entropy(functional_call(model, state, (images,)), labels)

        self._trained, self._fixed = trained, fixed
        self._gradients = vmap(grad_and_value(loss))

    def __call__(
        self,
        state: list[Tensor],
        velocity: list[Tensor],
        pull: list[Tensor],
        images: Tensor,
        labels: Tensor,
        first: bool,
        sgd: SGD,
    ) -> Tensor:
        parameters, others = [state[i] for i in self._trained], [state[i] for i in self._fixed]
        gradients, losses = self._gradients(parameters, others, images, labels)
        sgd_step(parameters, gradients, velocity, pull, sgd, first=first)
        loss: Tensor = losses
        return loss


def obstacle(model: nn.Module) -> str | None:
    """Say what keeps a model from being trained in a stack, such as "BatchNorm", or None.

    BatchNorm writes to its statistics, and random modules draw from the one global generator, where every
    client needs its own.
    """
    if has_batch_norm(model):
        return "BatchNorm"
    for module in model.modules():
        dropout = getattr(module, "dropout", 0) or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p)
        if dropout or isinstance(module, nn.RReLU):
            return "dropout or other randomness"
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        return "tensors shared between layers"
    return None
