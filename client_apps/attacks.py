"""Contaminated clients, for studies of robustness: what they send instead of an honest update, or train on.

An attack is simulated: the client trains all the same, and what it reports of its training is true. Per tensor, with
g = trained − received and s = `client.attack_strength`, it sends received +

- `scaled_noise`: Gaussian noise of the length s‖g‖, another in each round;
- `sign_flip`: −s g;
- `other_subspace`: s g Q for a matrix g, s g for a tensor of another dimension. Q is a random signed permutation of the
  input coordinates (the columns), the client's own and the same in every round. It is orthogonal, so that g Q has the
  singular values and the column space of g, and another row space: what a client looks like that adapts to
  something else.

With `shuffled_labels` it sends what it has trained, on labels that are permuted over its training samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_apps.config import ClientConfig

METRIC = "attacked"
"""Name under which clients report whether they are contaminated, 1 or 0: for the run's records, never for a strategy,
which has to find out by itself."""

SHUFFLED_LABELS = "shuffled_labels"

# Set these streams apart from those of training, which a task tells apart by small numbers.
_NOISE, _SUBSPACE, _LABELS = 0xA77AC1, 0xA77AC2, 0xA77AC3


def contaminate(
    options: ClientConfig,
    received: Sequence[NDArray[Any]],
    trained: Sequence[NDArray[Any]],
    *,
    seed: int,
    cid: int,
    server_round: int,
) -> list[NDArray[Any]]:
    """Return what a contaminated client sends; the formulas are those of this module.

    Parameters
    ----------
    options : ClientConfig
        `attack`, not None, and `attack_strength`.
    received, trained : sequence of ndarray
        The model before and after training, tensor by tensor in the same order and shapes. Not changed.
    seed, cid, server_round : int
        What noise and permutations are drawn from, and nothing else: neither depends on who else takes part.

    Returns
    -------
    list of ndarray
        C-contiguous, in the dtypes of `trained`, computed in float64; what overflows is infinite. Floating-point
        tensors change, buffers among them; counters are those of `trained`.
    """
    if options.attack == SHUFFLED_LABELS:
        return list(trained)
    noise = np.random.default_rng([seed, cid, server_round, _NOISE])
    sent = []
    with np.errstate(all="ignore"):  # a diverged or overflowing model is the server's to reject
        for position, (before, after) in enumerate(zip(received, trained, strict=True)):
            if not np.issubdtype(after.dtype, np.floating):
                sent.append(after)
                continue
            start = before.astype(after.dtype).astype(np.float64)  # what the client began with, in the model's dtype
            update = after.astype(np.float64) - start
            if options.attack == "scaled_noise":
                update = _noise_like(update, noise)
            elif options.attack == "sign_flip":
                update = -update
            elif update.ndim == 2:
                update = _elsewhere(update, np.random.default_rng([seed, cid, position, _SUBSPACE]))
            sent.append(np.asarray(start + options.attack_strength * update).astype(after.dtype, order="C"))
    return sent


def shuffled(count: int, seed: int, cid: int) -> NDArray[np.int64]:
    """Return whose label each of a client's training samples gets with `shuffled_labels`, the same in every round.

    A permutation of 0..count-1. Where all samples have one label there is nothing to shuffle.
    """
    return np.random.default_rng([seed, cid, _LABELS]).permutation(count)


def _noise_like(update: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return Gaussian noise of the length of an update."""
    noise = np.asarray(generator.standard_normal(update.shape))
    return noise * (np.linalg.norm(update) / np.linalg.norm(noise)) if update.size else noise


def _elsewhere(update: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return g Q of a matrix, (rows, columns)."""
    columns = update.shape[1]
    order, signs = generator.permutation(columns), generator.choice([-1.0, 1.0], columns)
    moved: NDArray[np.float64] = update[:, order] * signs
    return moved
