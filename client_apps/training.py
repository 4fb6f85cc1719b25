"""The local loop: SGD on one client's samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        Of torch.optim.SGD, which starts without history.
    epochs, batch_size : int
        Passes over the samples, and samples of a step.
    seed : int
        Decides order, augmentation and dropout; the global generators are neither read nor moved.
    """
    count = len(labels)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    skip_single = 1 < batch_size < count and count % batch_size == 1 and _has_batch_norm(model)
    model.train()
    loss_sum = torch.zeros((), dtype=torch.float64, device=images.device)
    seen, steps, coefficient, step_weight = 0, 0, 0.0, 0.0
    with isolated_rng(seed, images.device):
        for _ in range(epochs):
            order = torch.randperm(count, generator=generator)
            if skip_single:
                order = order[:-1]
            for batch in torch.split(order.to(images.device), batch_size):
                optimiser.zero_grad()
                loss = F.cross_entropy(model(transform(images[batch], generator)), labels[batch])
                torch.autograd.backward(loss)
                optimiser.step()
                loss_sum += loss.detach() * len(batch)  # read once at the end: a GPU need not wait for the host
                seen += len(batch)
                steps += 1
                # The k-th gradient enters this step with weight momentum^(steps - k).
                coefficient = momentum * coefficient + 1
                step_weight += coefficient
    return TrainResult(count, loss_sum.item() / seen, steps, step_weight)


@contextlib.contextmanager
def isolated_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of the CPU and of the device, and restore both afterwards."""
    cuda = [device] if device.type == "cuda" else []
    # torch.manual_seed would seed every GPU, also those that fork_rng does not restore.
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for gpu in cuda:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
