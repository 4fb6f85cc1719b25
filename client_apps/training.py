"""The local loop: SGD on the losses of one client, pulled to a model where there is a proximal term."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_apps.errors import ConfigError

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class TrainResult:
    """What a client reports of one round of local training.

    Parameters
    ----------
    num_examples : int
        Size of its training split.
    train_loss : float
        Mean loss per sample over the whole local training, without a proximal term; not finite where training
        diverged.
    local_steps : int
        SGD steps taken.
    step_weight : float
        FedNova's ‖a_i‖₁ (Wang et al. 2020, arXiv 2007.07481, section 4): how often the gradients of the
        local steps enter the update, in units of the learning rate. Equals local_steps for plain SGD; see the
        function `step_weight`.
    """

    num_examples: int
    train_loss: float
    local_steps: int
    step_weight: float


class SGD(NamedTuple):
    """Options of a step, as of torch.optim.SGD, and the factor of a proximal term.

    The proximal term (μ/2)‖w − c‖² has the gradient μ w − μ c: a decay of the weights by μ, and a constant, which
    the steps take as `pull`.
    """

    lr: float
    momentum: float
    weight_decay: float
    proximal_mu: float = 0.0

    @property
    def decay(self) -> float:
        """What multiplies the weights in the gradient: weight decay and proximal term together."""
        return self.weight_decay + self.proximal_mu

    def pull(self, center: Sequence[Tensor]) -> list[Tensor]:
        """Return the constant part μ c of the proximal gradient; empty, and never computed, for μ = 0."""
        if not self.proximal_mu:
            return []
        return [tensor.detach() * self.proximal_mu for tensor in center]


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
    proximal_mu: float = 0.0,
    center: Sequence[Tensor] | None = None,
) -> TrainResult:
    """Train a classifier in place with cross-entropy; see `descend`.

    The last batch of an epoch may be smaller. One of a single sample is skipped where the model has
    BatchNorm, whose batch statistics need more than one, unless batches are that small anyway.

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
    proximal_mu : float
        μ >= 0; 0 leaves the proximal term out.
    center : sequence of Tensor, optional
        As of `descend`.
    """
    count = len(labels)
    generator = torch.Generator().manual_seed(seed)
    skip_single = 1 < batch_size < count and count % batch_size == 1 and has_batch_norm(model)
    if not model.training:  # the walk over the modules is not free, and between clients nobody changes the mode
        model.train()

    def losses() -> Iterator[tuple[Tensor, int]]:
        for _ in range(epochs):
            order = torch.randperm(count, generator=generator)
            if skip_single:
                order = order[:-1]
            for batch in torch.split(order.to(images.device), batch_size):
                yield F.cross_entropy(model(transform(images[batch], generator)), labels[batch]), len(batch)

    with isolated_rng(seed, images.device):
        return descend(model, losses(), SGD(lr, momentum, weight_decay, proximal_mu), num_examples=count, center=center)


def descend(
    model: nn.Module,
    losses: Iterable[tuple[Tensor, int]],
    sgd: SGD,
    *,
    num_examples: int,
    center: Sequence[Tensor] | None = None,
) -> TrainResult:
    """Take a step on each of the losses, whatever they are of.

    With a proximal term the objective is F(w) + (μ/2)‖w − c‖² over the trained parameters: FedProx (Li et al.
    2020, arXiv 1812.06127, eq. 2) where c is the model as it comes in, the personal model of Ditto (Li et al. 2021,
    arXiv 2012.04221, eq. Ditto) where c is the global one.

    A loss that is not finite ends up in the weights, where the server sees and rejects it.

    Parameters
    ----------
    model : nn.Module
        Trained in place, on its own device.
    losses : iterable of (Tensor, int)
        Mean loss of each batch and the batch's size. The next one is asked for after the step on the one before, so
        that a generator computes each with the model as it is then. At least one.
    sgd : SGD
        Options; it starts without history.
    num_examples : int
        Size of the training split, for the result.
    center : sequence of Tensor, optional
        c, one tensor for each state_dict entry and in its order, of which those of trained parameters count; by
        default the model as it comes in.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters: list[Tensor] = list(trained.values())
    if center is not None:
        named = dict(zip(model.state_dict(), center, strict=True))
        pull = sgd.pull([named[name] for name in trained])
    else:
        pull = sgd.pull(parameters)
    velocity = [torch.empty_like(p, requires_grad=False) for p in parameters] if sgd.momentum else []
    loss_sum = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    seen, steps = 0, 0
    for loss, size in losses:
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            sgd_step(parameters, gradients, velocity, pull, sgd, first=not steps)
        loss_sum += loss.detach() * size  # read once at the end: a GPU need not wait for the host
        seen += size
        steps += 1
    return TrainResult(num_examples, loss_sum.item() / seen, steps, step_weight(steps, sgd))


def sgd_step(
    parameters: list[Tensor],
    gradients: Tensors,
    velocity: list[Tensor],
    pull: list[Tensor],
    sgd: SGD,
    *,
    first: bool,
) -> None:
    """Take one step of torch.optim.SGD: g <- g + decay w - pull; v <- momentum v + g; w <- w - lr v.

    Decay is weight_decay + μ and the pull μ c: weight decay and the gradient μ (w - c) of a proximal term both enter
    before momentum, as if torch.optim.SGD were given the gradient of the whole objective. Without a proximal term the
    operations and their order are torch's, so the results are, too; what is saved is the optimiser
    object, whose construction and hooks cost as much as a step of a small model.

    Parameters
    ----------
    parameters : list of Tensor
        w, changed in place, without autograd.
    gradients : list or tuple of Tensor
        g, one for each parameter.
    velocity : list of Tensor
        v, changed in place; unused, and may be empty, without momentum.
    pull : list of Tensor
        `SGD.pull` of the proximal term's center: empty, or one for each parameter, of a shape that broadcasts to its.
    sgd : SGD
        Options.
    first : bool
        Whether v becomes g, whatever it held before.
    """
    momentum, decay = sgd.momentum, sgd.decay
    if decay:
        gradients = torch._foreach_add(gradients, parameters, alpha=decay)
    if pull:  # then there is a decay, and the gradients are this function's own
        torch._foreach_sub_(gradients, pull)
    if momentum:
        if first:
            torch._foreach_copy_(velocity, gradients)
        else:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, gradients)
        gradients = velocity
    torch._foreach_add_(parameters, gradients, alpha=-sgd.lr)


def step_weight(steps: int, sgd: SGD) -> float:
    """Return FedNova's ‖a‖₁ (Wang et al. 2020, arXiv 2007.07481, section 4): how often gradients enter an update.

    a_k is the coefficient of the k-th gradient g_k of the data loss in (w_t − w)/lr after `steps` steps from w_t:

    - SGD: a = [1, ..., 1];
    - momentum β: a_k = (1 − β^(steps−k+1))/(1 − β);
    - proximal term μ: a_k = (1 − lr μ)^(steps−k).

    With both, the steps v <- β v + g_k − μ lr x, x <- x + v of x = (w_t − w)/lr are linear in the gradients and the
    same at all times: a_k is h_(steps−k), where h_j is what a single gradient of 1 leaves in x after j more steps.
    Summed up, the recursion of v gives h_(j+1) = β h_j + 1 − lr μ (h_0 + ... + h_j) from h_0 = 1, which holds all
    three cases above. Where proximal steps overshoot, some coefficients are negative; ‖a‖₁ sums their sizes. Weight
    decay counts as part of the data loss, as the gradient of an L2 penalty.

    Parameters
    ----------
    steps : int
        Local steps taken.
    sgd : SGD
        lr, momentum and proximal_mu of these steps.
    """
    shrink = sgd.lr * sgd.proximal_mu
    coefficient, past, total = 0.0, 0.0, 0.0
    for _ in range(steps):
        coefficient = sgd.momentum * coefficient + 1 - shrink * past
        past += coefficient
        total += abs(coefficient)
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


def seed_of(*words: int) -> int:
    """Mix integers into one seed of 63 bits, so that neighbouring clients and rounds are unrelated."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def find_device(name: object) -> torch.device:
    """Return the device of `client.device`.

    Raises
    ------
    ConfigError
        It is no device's name, or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"client.device must be auto, cpu, cuda or cuda:<index>, not {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"client.device={name} is not there: PyTorch sees {torch.cuda.device_count()} GPUs; use client.device=auto."
        )
    return device


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether a module of the model is a BatchNorm."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
