"""The local loop: SGD on one client's samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class TrainResult:
    """What a client reports of one round of local training.

    Parameters
    ----------
    num_examples : int
        Size of its training split.
    train_loss : float
        Mean loss per sample over the whole local training; not finite where training diverged.
    local_steps : int
        SGD steps taken.
    step_weight : float
        FedNova's ‖a_i‖₁ (Wang et al. 2020, arXiv 2007.07481, section 4): how often the gradients of the
        local steps enter the update, in units of the learning rate. Equals local_steps without momentum.
    """

    num_examples: int
    train_loss: float
    local_steps: int
    step_weight: float


class SGD(NamedTuple):
    """Options of a step, as of torch.optim.SGD."""

    lr: float
    momentum: float
    weight_decay: float


def local_sgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    transform: Callable[[Tensor, torch.Generator], Tensor],
    lr: float,
    momentum: float,
    weight_decay: float,
    epochs: int,
    batch_size: int,
    seed: int,
) -> TrainResult:
    """Train a classifier in place with cross-entropy.

    The last batch of an epoch may be smaller. One of a single sample is skipped where the model has
    BatchNorm, whose batch statistics need more than one, unless batches are that small anyway.
    A loss that is not finite ends up in the weights, where the server sees and rejects it.

    Parameters
    ----------
    model : nn.Module
        Trained in place, on its own device.
    images : Tensor of uint8, shape (n, c, h, w), n >= 1
        On the model's device.
    labels : Tensor of int64, shape (n,)
        On the model's device.
    transform : Callable
        Turns a batch of images into network input with the given CPU generator.
    lr, momentum, weight_decay : float
        As of torch.optim.SGD, which starts without history.
    epochs, batch_size : int
        Passes over the samples, and samples of a step.
    seed : int
        Decides order, augmentation and dropout; the global generators are neither read nor moved.
    """
    count = len(labels)
    generator = torch.Generator().manual_seed(seed)
    skip_single = 1 < batch_size < count and count % batch_size == 1 and has_batch_norm(model)
    if not model.training:  # the walk over the modules is not free, and between clients nobody changes the mode
        model.train()
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    sgd = SGD(lr, momentum, weight_decay)
    velocity = [torch.empty_like(p, requires_grad=False) for p in parameters] if momentum else []
    loss_sum = torch.zeros((), dtype=torch.float64, device=images.device)
    seen, steps = 0, 0
    with isolated_rng(seed, images.device):
        for _ in range(epochs):
            order = torch.randperm(count, generator=generator)
            if skip_single:
                order = order[:-1]
            for batch in torch.split(order.to(images.device), batch_size):
                loss = F.cross_entropy(model(transform(images[batch], generator)), labels[batch])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    sgd_step(parameters, gradients, velocity, sgd, first=not steps)
                loss_sum += loss.detach() * len(batch)  # read once at the end: a GPU need not wait for the host
                seen += len(batch)
                steps += 1
    return TrainResult(count, loss_sum.item() / seen, steps, step_weight(steps, momentum))


def sgd_step(
    parameters: list[Tensor],
    gradients: Tensors,
    velocity: list[Tensor],
    sgd: SGD,
    *,
    first: bool,
) -> None:
    """Take one step of torch.optim.SGD: g <- g + weight_decay w; v <- momentum v + g; w <- w - lr v.

    The operations and their order are torch's, so the results are, too; what is saved is the optimiser
    object, whose construction and hooks cost as much as a step of a small model.

    Parameters
    ----------
    parameters : list of Tensor
        w, changed in place, without autograd.
    gradients : list or tuple of Tensor
        g, one for each parameter.
    velocity : list of Tensor
        v, changed in place; unused, and may be empty, without momentum.
    sgd : SGD
        Options.
    first : bool
        Whether v becomes g, whatever it held before.
    """
    lr, momentum, weight_decay = sgd
    if weight_decay:
        gradients = torch._foreach_add(gradients, parameters, alpha=weight_decay)
    if momentum:
        if first:
            torch._foreach_copy_(velocity, gradients)
        else:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, gradients)
        gradients = velocity
    torch._foreach_add_(parameters, gradients, alpha=-lr)


def step_weight(steps: int, momentum: float) -> float:
    """Sum over the steps k = 1..steps of how often the k-th gradient is used; see `TrainResult`."""
    coefficient, total = 0.0, 0.0
    for _ in range(steps):
        # The k-th gradient enters this step with weight momentum^(steps - k).
        coefficient = momentum * coefficient + 1
        total += coefficient
    return total


@contextlib.contextmanager
def isolated_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of the CPU and of the device, and restore both afterwards."""
    # By hand: torch.random.fork_rng costs as much as a small model's step, and torch.manual_seed would seed every
    # GPU, also those that are not restored.
    cuda = device.type == "cuda"
    state = torch.default_generator.get_state()
    cuda_state = torch.cuda.get_rng_state(device) if cuda else None
    try:
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.default_generator.set_state(state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether a module of the model is a BatchNorm."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
