"""SGD steps of stacked networks of linear layers and activations, by batched matrix products.

torch.func can do the same; here a step of a small network costs half, and in a group of one no more than
training the network itself: a weight's gradient is added to the weight by the product that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_apps.training import SGD, sgd_step

ALIGNMENT = 64  # bytes: a cache line, and the widest vector registers there are

# All act on each number by itself, so they apply to a stack as they are.
ACTIVATIONS = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
)


class StackedLinearNetwork:
    """A chain of Flatten, Linear and activation modules; `of` makes one.

    Parameters
    ----------
    layers : sequence
        For a Linear, the places of its weight and of its bias (or None) in the state_dict; for any other
        module, the module itself.
    """

    def __init__(self, layers: Sequence[tuple[int, int | None] | nn.Module]) -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> StackedLinearNetwork | None:
        """Return the chain that computes what the model does, or None where it is no such chain."""
        named = [(name, module) for name, module in model.named_modules() if not list(module.children())]
        places = {name: i for i, name in enumerate(model.state_dict())}
        layers: list[tuple[int, int | None] | nn.Module] = []
        for name, module in named:
            if type(module) is nn.Linear:
                layers.append((places[f"{name}.weight"], places.get(f"{name}.bias")))
            elif type(module) in ACTIVATIONS or (
                type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
            ):
                layers.append(module)
            else:
                return None
        used = [place for layer in layers if isinstance(layer, tuple) for place in layer if place is not None]
        if sorted(used) != list(range(len(places))) or not all(p.requires_grad for p in model.parameters()):
            return None
        if not _is_chain(model, [module for _, module in named]):
            return None
        return cls(layers)

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
        """See `client_apps.vectorized.Step`."""
        # The parameters change on the way back and are no leaves of autograd: the graph hangs on this one instead.
        anchor = torch.zeros((), device=images.device, requires_grad=True)
        x = images
        for layer in self._layers:
            if isinstance(layer, tuple):
                parameters = [None if place is None else state[place] for place in layer]
                velocities = [None if place is None or not velocity else velocity[place] for place in layer]
                pulls = [None if place is None or not pull else pull[place] for place in layer]
                x = _Linear.apply(anchor, x, *parameters, *velocities, *pulls, first, sgd)
            elif isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            else:
                x = layer(x)
        clients, batch, classes = x.shape
        each = F.cross_entropy(x.reshape(-1, classes), labels.reshape(-1), reduction="none")
        losses = each.view(clients, batch).mean(1)
        # Each loss depends on its own client's slice alone, so the sum's gradient is the stack of theirs.
        torch.autograd.backward(losses.sum())
        return losses.detach()


class _Linear(torch.autograd.Function):
    """k linear layers on k batches; on the way back the weights take their step."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_velocity: Tensor | None,
        bias_velocity: Tensor | None,
        weight_pull: Tensor | None,
        bias_pull: Tensor | None,
        first: bool,
        sgd: SGD,
    ) -> Tensor:
        x = aligned(x)
        ctx.save_for_backward(x)
        # Not saved through autograd, which refuses what was changed in place.
        ctx.rest = weight, bias, weight_velocity, bias_velocity, weight_pull, bias_pull, first, sgd
        out = empty_stack(len(x), (x.shape[1], weight.shape[1]), x)
        if bias is None:
            return torch.bmm(x, weight.mT, out=out)
        return out.copy_(bias.unsqueeze(1)).baddbmm_(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = aligned(gradients[0])
        (x,) = ctx.saved_tensors
        weight, bias, weight_velocity, bias_velocity, weight_pull, bias_pull, first, sgd = ctx.rest
        to_x = None
        if ctx.needs_input_grad[1]:  # before the weight's step
            to_x = torch.bmm(gradient, weight, out=empty_stack(len(x), x.shape[1:], x))
        transposed = gradient.mT
        lr, momentum, decay = sgd.lr, sgd.momentum, sgd.decay
        if not momentum:
            weight.baddbmm_(transposed, x, beta=1 - lr * decay, alpha=-lr)
            if weight_pull is not None:
                weight.add_(weight_pull, alpha=lr)
        else:
            weight_velocity.baddbmm_(transposed, x, beta=0 if first else momentum)
            if decay:
                weight_velocity.add_(weight, alpha=decay)
            if weight_pull is not None:
                weight_velocity.sub_(weight_pull)
            weight.sub_(weight_velocity, alpha=lr)
        if bias is not None:
            bias_pulls = [] if bias_pull is None else [bias_pull]
            sgd_step([bias], [gradient.sum(1)], [bias_velocity], bias_pulls, sgd, first=first)
        return None, to_x, *[None] * 8


def empty_stack(count: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """Make an uninitialised tensor of shape (count, *shape) whose slices are contiguous and `aligned`."""
    size = math.prod(shape)
    unit = ALIGNMENT // like.element_size()
    if count == 1 or size % unit == 0:
        return like.new_empty(count, *shape)
    return like.new_empty(count, -(-size // unit) * unit)[:, :size].view(count, *shape)


def aligned(stack: Tensor) -> Tensor:
    """Return the stack of matrices, or a copy of it where its slices do not all start at a multiple of ALIGNMENT bytes.

    A matrix product may add up in another order where its operands start elsewhere; a client's bits would then
    depend on its place in the stack.
    """
    across, down, along = stack.stride()
    step = across * stack.element_size() if len(stack) > 1 else 0
    if along == 1 and down == stack.shape[2] and step % ALIGNMENT == 0 and stack.data_ptr() % ALIGNMENT == 0:
        return stack
    return empty_stack(len(stack), stack.shape[1:], stack).copy_(stack)


def _is_chain(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Compare the model with its innermost modules run one after the other, which is how they are usually meant."""
    first = next((module for module in modules if isinstance(module, nn.Linear)), None)
    if first is None or not isinstance(modules[0], nn.Flatten):
        return False
    probe = torch.linspace(-1, 1, 2 * first.in_features, device=first.weight.device).view(2, 1, 1, first.in_features)
    try:
        with torch.no_grad():
            out = probe
            for module in modules:
                out = module(out)
            return torch.equal(out, model(probe))
    except RuntimeError:  # shapes that do not fit: not this order
        return False
