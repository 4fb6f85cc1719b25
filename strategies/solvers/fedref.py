"""FedRef's mathematics: a reference model from past global models, and the MAP estimate that is pulled to it.

Yoon, Choi, De Neve, "FedRef: Communication-Efficient Bayesian Fine-Tuning using a Reference Model", arXiv 2506.23210.
The objective is L(θ) = F(θ) + (λ_g/2)‖θ − θ_r‖² + (λ_ref/2)‖θ − θ_ref‖², F the clients' mean loss, θ_r the global
model they received. The server cannot evaluate F; its quadratic surrogate around the aggregate, ‖θ − θ_agg‖²/(2η),
makes L a sum of three parabolas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers that are widened to float64 at a time.
_BLOCK = 2**20


class MapWeights(NamedTuple):
    """What the MAP estimate takes of θ_agg, θ_r and θ_ref; the three sum to one."""

    aggregate: float
    previous: float
    reference: float


def reference_weights(count: int) -> list[float]:
    """Return w_i ∝ p − i + 1 for i = 1..p = `count`, newest model first; they sum to one.

    Raises
    ------
    ValueError
        If `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"a reference needs one past model or more, not {count}.")
    total = count * (count + 1) / 2
    return [(count - i) / total for i in range(count)]


def reference(history: Sequence[Tensor]) -> Tensor:
    """Return θ_ref = Σ w_i θ_i, the newest model heaviest: one pass over each model, a block of numbers at a time.

    Parameters
    ----------
    history : sequence of p tensors of one shape, newest first
        Any floating-point dtype.

    Returns
    -------
    Tensor, float64, on the device of the newest

    Raises
    ------
    ValueError
        If there is no model, or they differ in shape.
    """
    weights = reference_weights(len(history))
    _require_one_shape(*history)
    total = torch.zeros_like(history[0], dtype=torch.float64, memory_format=torch.contiguous_format)
    flat, models = total.view(-1), [model.reshape(-1) for model in history]
    for start in range(0, flat.numel(), _BLOCK):  # a whole model in float64 would be a copy of it for each
        block = flat[start : start + _BLOCK]
        for weight, model in zip(weights, models, strict=True):
            block.add_(model[start : start + _BLOCK].to(block), alpha=weight)
    return total


def map_weights(*, eta: float, lambda_global: float, lambda_ref: float) -> MapWeights:
    """Return the weights of `map_estimate`.

    Raises
    ------
    ValueError
        If η is not above 0 and finite, or a λ is negative or NaN.
    """
    if not (math.isfinite(eta) and eta > 0):
        raise ValueError(f"eta={eta!r} must be a finite number above 0.")
    for name, value in (("lambda_global", lambda_global), ("lambda_ref", lambda_ref)):
        if not value >= 0:
            raise ValueError(f"{name}={value!r} must be a number of at least 0.")
    # As shares of the largest of the three, so that no sum overflows.
    curvatures = (1 / eta, lambda_global, lambda_ref)
    largest = max(curvatures)
    parts = [1.0 if x == largest else x / largest if math.isfinite(largest) else 0.0 for x in curvatures]
    total = sum(parts)
    return MapWeights(*(part / total for part in parts))


def map_estimate(
    aggregate: Tensor, previous: Tensor, reference: Tensor, *, eta: float, lambda_global: float, lambda_ref: float
) -> Tensor:
    """Return the minimiser of L in closed form: (θ_agg/η + λ_g θ_r + λ_ref θ_ref) / (1/η + λ_g + λ_ref).

    Parameters
    ----------
    aggregate, previous, reference : Tensor, of one shape
        θ_agg, θ_r, θ_ref; any floating-point dtype, computed in float64.
    eta : float
        η > 0: how far the clients' mean loss is trusted; the surrogate's curvature is 1/η.
    lambda_global, lambda_ref : float
        λ_g, λ_ref ≥ 0. With both 0 the result is θ_agg, bit for bit; math.inf gives the limit, θ_r or θ_ref.

    Raises
    ------
    ValueError
        If η or a λ is out of range, or the shapes differ.
    """
    _require_one_shape(aggregate, previous, reference)
    weights = map_weights(eta=eta, lambda_global=lambda_global, lambda_ref=lambda_ref)
    result = weights.aggregate * aggregate.to(torch.float64)
    for weight, model in ((weights.previous, previous), (weights.reference, reference)):
        if weight:
            result = result.add_(model.to(torch.float64), alpha=weight)
    return result


def largest_step(*, eta: float, lambda_global: float, lambda_ref: float) -> float:
    """Return the step size from which `descend` no longer converges: 2 / (1/η + λ_g + λ_ref), 2 over L's curvature."""
    return 2 / (1 / eta + lambda_global + lambda_ref)


def descend(
    aggregate: Tensor,
    previous: Tensor,
    reference: Tensor,
    *,
    eta: float,
    lambda_global: float,
    lambda_ref: float,
    steps: int,
    lr: float,
) -> Tensor:
    """Minimise L by gradient steps from θ_agg, as the paper's server does.

    Converges to `map_estimate` for 0 < lr < `largest_step`, by the factor |1 − lr (1/η + λ_g + λ_ref)| a step.

    Parameters
    ----------
    aggregate, previous, reference, eta, lambda_global, lambda_ref
        See `map_estimate`.
    steps : int
        Number of steps; with 0 the result is θ_agg.
    lr : float
        Length of a step.
    """
    center = aggregate.to(torch.float64)

    def likelihood(theta: Tensor) -> Tensor:
        return (theta - center) / eta

    return descend_on(
        likelihood, center, previous, reference,
        lambda_global=lambda_global, lambda_ref=lambda_ref, steps=steps, lr=lr,
    )  # fmt: skip


def descend_on(
    likelihood: Callable[[Tensor], Tensor],
    start: Tensor,
    previous: Tensor,
    reference: Tensor,
    *,
    lambda_global: float,
    lambda_ref: float,
    steps: int,
    lr: float,
) -> Tensor:
    """Take gradient steps on F(θ) + (λ_g/2)‖θ − θ_r‖² + (λ_ref/2)‖θ − θ_ref‖² for any F.

    Parameters
    ----------
    likelihood : callable
        ∇F at θ, of its shape.
    start : Tensor
        Where to begin; not changed.
    previous, reference, lambda_global, lambda_ref, steps, lr
        See `descend`.

    Returns
    -------
    Tensor, float64
    """
    _require_one_shape(start, previous, reference)
    theta = start.to(torch.float64, copy=True)
    for _ in range(steps):
        gradient = likelihood(theta).to(torch.float64)
        if lambda_global:
            gradient = gradient.add(theta - previous, alpha=lambda_global)
        if lambda_ref:
            gradient = gradient.add(theta - reference, alpha=lambda_ref)
        theta.sub_(gradient, alpha=lr)
    return theta


def _require_one_shape(*tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise ValueError(f"the models must have one shape, not {' and '.join(map(str, dict.fromkeys(shapes)))}.")
