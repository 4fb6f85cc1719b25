"""A model of several layers and its clients as plain float64 vectors, for tests that work a method out themselves."""

from dataclasses import dataclass, field

import cvxpy
import numpy as np
from flwr.common import Parameters, ndarrays_to_parameters

from strategies import LayerMap

from .helpers import arrays_of, result

# What a small network sends: a convolution with its BatchNorm is one layer, a head another, a temperature a third.
NAMES = [
    "conv.weight",
    "conv.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "head.weight",
    "head.bias",
    "temperature",
]
SHAPES = [(3, 2, 2), (3,), (3,), (3,), (3,), (3,), (), (4, 5), (4,), ()]
LAYERS = LayerMap.from_names(NAMES, SHAPES)
TRAINED = [0, 1, 2, 3, 7, 8, 9]
"""Positions of the tensors that are trained, in the order in which a vector holds them."""
PARTS = [slice(0, 21), slice(21, 45), slice(45, 46)]
"""Each layer's part of a vector."""
SIZE = 46


@dataclass
class Client:
    """What one client does in a round: its update as a vector, and what it says of itself."""

    update: np.ndarray
    num_examples: int = 10
    metrics: dict = field(default_factory=dict)


def start(seed=0, dtype=np.float64) -> list[np.ndarray]:
    """The arrays of a global model; a running variance is positive, the counter an int64."""
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]
    arrays[5] = np.abs(arrays[5])
    arrays[6] = np.array(7, dtype=np.int64)
    return arrays


def parameters(seed=0, dtype=np.float64) -> Parameters:
    return ndarrays_to_parameters(start(seed, dtype))


def flat(arrays) -> np.ndarray:
    """The trained tensors one after another, float64."""
    return np.concatenate([arrays[t].astype(np.float64).ravel() for t in TRAINED])


def moved(arrays, vector) -> list[np.ndarray]:
    """The arrays after an update, buffers and counters as they are."""
    out, offset = list(arrays), 0
    for t in TRAINED:
        size = arrays[t].size
        part = vector[offset : offset + size].reshape(arrays[t].shape)
        out[t] = np.asarray(arrays[t] + part).astype(arrays[t].dtype)
        offset += size
    return out


def clients(count, seed, *, losses=None, scale=1.0, common=0.0) -> dict[str, Client]:
    """Clients "0", "1", ... with unequal updates, lengths and numbers of examples; `common` makes them agree more."""
    rng = np.random.default_rng(seed)
    shared = common * rng.normal(size=SIZE)
    found = {}
    for i in range(count):
        update = scale * rng.uniform(0.5, 2) * (shared + rng.normal(size=SIZE))
        loss = rng.uniform(0.1, 3) if losses is None else losses[i]
        found[str(i)] = Client(update, int(rng.integers(5, 50)), {"initial_loss": float(loss)})
    return found


def play(strategy, number, arrays, sent: dict[str, Client]) -> tuple[list[np.ndarray], np.ndarray, dict]:
    """One round: the new model's arrays, how far its trained tensors moved, and the round's metrics."""
    results = [
        result(cid, moved(arrays, client.update), client.num_examples, client.metrics) for cid, client in sent.items()
    ]
    after, metrics = strategy.aggregate_fit(number, results, [])
    assert metrics["failed_round"] is False, metrics
    new = arrays_of(after)
    return new, flat(new) - flat(arrays), metrics


def matrix(sent: dict[str, Client]) -> np.ndarray:
    """The clients' updates as rows."""
    return np.stack([client.update for client in sent.values()])


def shares(sent: dict[str, Client]) -> np.ndarray:
    sizes = np.array([client.num_examples for client in sent.values()], np.float64)
    return sizes / sizes.sum()


def losses_of(sent: dict[str, Client]) -> np.ndarray:
    return np.array([client.metrics["initial_loss"] for client in sent.values()])


def unit_rows(G) -> np.ndarray:
    return G / np.linalg.norm(G, axis=1, keepdims=True)


def convex(objective, constraints, *variables) -> list[np.ndarray]:
    """Values of the variables at the minimum, by CVXPY with tight tolerances."""
    problem = cvxpy.Problem(cvxpy.Minimize(objective), constraints)
    problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    assert problem.status == cvxpy.OPTIMAL, problem.status
    return [variable.value for variable in variables]


def min_norm_weights(rows, lower=0.0, upper=1.0) -> np.ndarray:
    """λ on the simplex between bounds, such that ‖Σ λ_i row_i‖ is smallest."""
    weights = cvxpy.Variable(len(rows))
    bounds = [cvxpy.sum(weights) == 1, weights >= lower, weights <= upper]
    return convex(cvxpy.sum_squares(rows.T @ weights), bounds, weights)[0]
