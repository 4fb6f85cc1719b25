"""Multi-response linear models that share a row space, all but the contaminated ones: CLAIR's first study.

He, Chen, Feng, arXiv 2605.21217; the paper's sizes are not public, so that the scales are our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from client_apps.config import at_least_zero, choice, integer, positive
from client_apps.errors import ConfigError

Array = NDArray[np.float64]
Contaminated = int | float | Sequence[int]

# Set what is drawn apart, and apart from the streams of training, which a task tells apart by small numbers.
_COMMON, _CLIENT, _ELSEWHERE, _OFF, _TRAIN, _TEST = range(0x11EA01, 0x11EA07)


@dataclass(frozen=True)
class LinearConfig:
    """The models and samples of all clients: `dataset` of dataset=linear.

    Parameters
    ----------
    name : "linear"
    p, q : int
        Inputs and responses.
    rank : int
        r, at most min(p, q).
    n : int
        Samples a client trains on.
    test_samples : int
        Samples a client tests on, at least 2: R² needs a variance.
    noise : float
        σ of the responses, at least 0.
    signal : float
        Standard deviation of the entries of a benign client's B_k, above 0.
    contamination : float
        The same of a contaminated client, above 0.
    heterogeneity : float
        Standard deviation of the entries of what benign clients have outside the shared row space, at least 0.
    contaminated : int, float or list of int
        Whose row space is another one: see `members`.
    """

    name: str
    p: int = 20
    q: int = 10
    rank: int = 2
    n: int = 200
    test_samples: int = 200
    noise: float = 1.0
    signal: float = 0.3
    contamination: float = 1.0
    heterogeneity: float = 0.0
    contaminated: Contaminated = 0

    def __post_init__(self) -> None:
        choice("dataset.name", self.name, ["linear"])
        for key, low in (("p", 1), ("q", 1), ("rank", 1), ("n", 1), ("test_samples", 2)):
            integer(f"dataset.{key}", getattr(self, key), low)
        if self.rank > min(self.p, self.q):
            raise ConfigError(
                f"dataset.rank={self.rank} exceeds the smaller of dataset.p={self.p} and dataset.q={self.q}; lower it."
            )
        at_least_zero("dataset.noise", self.noise, below=1e6)
        for key in ("signal", "contamination"):
            positive(f"dataset.{key}", getattr(self, key))
            at_least_zero(f"dataset.{key}", getattr(self, key), below=1e6)
        at_least_zero("dataset.heterogeneity", self.heterogeneity, below=1e6)


def members(contaminated: Contaminated, num_clients: int) -> frozenset[int]:
    """Return the contaminated clients.

    Parameters
    ----------
    contaminated : int, float or sequence of int
        How many of the last clients; a share in [0, 1) of all clients, rounded to the nearest count, again the last
        ones; or their numbers.
    num_clients : int
        K.

    Raises
    ------
    ConfigError
        It is nothing of the kind, or names a client that there is not.
    """
    key = "dataset.contaminated"
    if isinstance(contaminated, Sequence) and not isinstance(contaminated, str):
        for cid in contaminated:
            integer(f"{key}: each", cid, 0)
        found = frozenset(contaminated)
    elif isinstance(contaminated, float):
        at_least_zero(key, contaminated, below=1)
        found = frozenset(range(num_clients - round(contaminated * num_clients), num_clients))
    else:
        integer(key, contaminated, 0)
        found = frozenset(range(num_clients - contaminated, num_clients))
    if found and (min(found) < 0 or max(found) >= num_clients):
        raise ConfigError(f"{key}={contaminated!r} does not fit num_clients={num_clients}, numbered from 0; lower it.")
    if len(found) == num_clients:
        raise ConfigError(f"{key}={contaminated!r} leaves none of num_clients={num_clients} benign; lower it.")
    return found


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """True matrices of all clients, and the samples they are to be estimated from.

    Attributes
    ----------
    weights : ndarray of float64, shape (K, q, p)
        W_k.
    basis : ndarray of float64, shape (r, p)
        A, with orthonormal rows.
    benign : ndarray of bool, shape (K,)
        Whose W_k − W_0 has the row space of A, but for the heterogeneity.
    seed, n : int
        What samples are drawn from, with the client's number; how many a client has.
    noise : float
        σ.
    """

    weights: Array
    basis: Array
    benign: NDArray[np.bool_]
    seed: int
    n: int
    noise: float

    def samples(
        self, k: int, split: Literal["train", "test"] = "train", count: int | None = None
    ) -> tuple[Array, Array]:
        """Draw a client's samples y = W_k x + σ e, with x ~ N(0, I_p) and e ~ N(0, I_q), the same at every call.

        Parameters
        ----------
        k : int
            Client, from 0.
        split : {"train", "test"}
            Which of two independent sets.
        count : int, optional
            How many; n by default.

        Returns
        -------
        tuple of two ndarray of float64, shapes (count, p) and (count, q)
            X and Y.
        """
        _, q, p = self.weights.shape
        rows = self.n if count is None else count
        generator = np.random.default_rng([self.seed, k, _TRAIN if split == "train" else _TEST])
        x, noise = generator.standard_normal((rows, p)), generator.standard_normal((rows, q))
        return x, x @ self.weights[k].T + self.noise * noise

    def ols(self, k: int) -> Array:
        """Return a client's least-squares estimate of W_k, (q, p)."""
        return least_squares(*self.samples(k))


def least_squares(x: Array, y: Array) -> Array:
    """Return the W, (q, p), that minimises ‖X Wᵀ − Y‖_F, for X (n, p) and Y (n, q); of several the shortest."""
    solution: Array = np.asarray(np.linalg.lstsq(x, y, rcond=None)[0], np.float64)
    return solution.T


def generate(
    seed: int,
    num_clients: int,
    contaminated: Contaminated = 0,
    *,
    q: int = 10,
    p: int = 20,
    rank: int = 2,
    n: int = 200,
    noise: float = 1.0,
    signal: float = 0.3,
    contamination: float = 1.0,
    heterogeneity: float = 0.0,
) -> LinearProblem:
    """Draw the clients' matrices: W_k = W_0 + B_k A + H_k for benign clients, W_0 + B_k A_k for contaminated ones.

    W_0, (q, p), has entries N(0, 1/p), so that each response of W_0 x has variance 1; B_k, (q, r), has entries
    N(0, signal²), and N(0, contamination²) where the client is contaminated. A and A_k, (r, p), have orthonormal rows,
    of uniformly distributed row spaces. H_k = E_k (I − AᵀA) with entries of E_k ~ N(0, heterogeneity²). A client's part
    is drawn from (seed, k) alone, so that runs with other contaminated clients have the rest in common.

    With signal .3, n=200, p=20, q=10, r=2 and 9 benign clients, the mean of their least-squares estimates misses a
    W_k by q r signal² (1 − 1/9) + p q σ²/(n − p − 1)/9 = 1.6 + .12 = 1.72 in squared Frobenius norm, which is the
    reference simulation's; entries N(0, 1/q) would give 1.90. Contaminated clients are further from W_0 than benign
    ones, as there: were they as close, the pairs they are in would hardly stand out of the noise.

    Parameters
    ----------
    seed : int
        Of everything.
    num_clients : int
        K.
    contaminated : int, float or sequence of int
        See `members`.
    q, p, rank, n, noise, signal, contamination, heterogeneity
        As in `LinearConfig`.

    Raises
    ------
    ConfigError
        One of them is out of range.
    """
    LinearConfig(
        "linear", p=p, q=q, rank=rank, n=n, noise=noise, signal=signal, contamination=contamination,
        heterogeneity=heterogeneity,
    )  # fmt: skip
    bad = members(contaminated, num_clients)
    common = np.random.default_rng([seed, _COMMON])
    center = common.standard_normal((q, p)) / np.sqrt(p)
    basis = _orthonormal(rank, p, common)
    weights = np.empty((num_clients, q, p))
    for k in range(num_clients):
        own = np.random.default_rng([seed, k, _CLIENT]).standard_normal((q, rank))
        if k in bad:
            elsewhere = _orthonormal(rank, p, np.random.default_rng([seed, k, _ELSEWHERE]))
            weights[k] = center + contamination * own @ elsewhere
        else:
            off = heterogeneity * np.random.default_rng([seed, k, _OFF]).standard_normal((q, p))
            weights[k] = center + signal * own @ basis + off - off @ basis.T @ basis
    benign = np.array([k not in bad for k in range(num_clients)])
    return LinearProblem(weights, basis, benign, seed, n, noise)


def _orthonormal(rank: int, p: int, generator: np.random.Generator) -> Array:
    """Return orthonormal rows, (rank, p), of a uniformly distributed row space."""
    columns, _ = np.linalg.qr(generator.standard_normal((p, rank)))
    rows: Array = columns.T.astype(np.float64)
    return rows
