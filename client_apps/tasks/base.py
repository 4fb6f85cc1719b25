"""What every task offers to the client app and to the server's evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from client_apps.config import ClientConfig
from client_apps.training import TrainResult

T = TypeVar("T")
SplitName = Literal["train", "test"]


@dataclass(frozen=True)
class Evaluation:
    """A model on the test or training splits of some clients, one entry for each in the order asked.

    Parameters
    ----------
    num_examples : ndarray of int64, shape (n,)
        Samples of the split; 0 is possible for test splits.
    loss_sum : ndarray of float64, shape (n,)
        Sum of the losses.
    sums : mapping of str to ndarray, each of shape (n, ...)
        What the task's scores are made of, by the names in `Task.sums`: sums over the samples of a client, int64 or
        float64, so that those of several clients add up.
    """

    num_examples: NDArray[np.int64]
    loss_sum: NDArray[np.float64]
    sums: Mapping[str, NDArray[Any]]


def quotient(sums: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Divide each client's sum by its number of samples, (n,); NaN where there are none."""
    quotients: NDArray[np.float64] = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
    return quotients


class Task(Protocol):
    """A learning problem dealt to `num_clients` clients, numbered from 0."""

    def __hash__(self) -> int:
        """By identity: what belongs to a task, such as a worker's model, is kept under it."""

    @property
    def num_clients(self) -> int:
        """Number of clients."""

    @property
    def seed(self) -> int:
        """What everything random is drawn from, with the client and the round."""

    @property
    def client(self) -> ClientConfig:
        """How clients train and answer."""

    @property
    def attackers(self) -> frozenset[int]:
        """The clients that are contaminated; see `client_apps.attacks`."""

    @property
    def metric(self) -> str:
        """Name of the score a model is judged by, such as accuracy: in [0, 1], higher is better."""

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """The entries of `Evaluation.sums` and the shape of one client's; no name is that of a metric.

        They are never negative.
        """

    def check(self) -> None:
        """Read the data and raise ConfigError for whatever could stop a client later."""

    @property
    def vectorized(self) -> bool:
        """Whether clients are trained in stacks, which is when `train_many` may be called."""

    def new_model(self) -> nn.Module:
        """Make the initial model, the same for the same seed."""

    def train_size(self, cid: int) -> int:
        """Size of a client's training split."""

    def test_size(self, cid: int) -> int:
        """Size of a client's test split."""

    @property
    def personal(self) -> bool:
        """Whether clients train a personal model, too, which is when the two `train_personal` may be called."""

    def train(self, model: nn.Module, cid: int, server_round: int, proximal_mu: float = 0.0) -> TrainResult:
        """Train the model in place on a client's training split, with `proximal_mu` as FedProx."""

    def train_many(
        self,
        state: Sequence[Tensor],
        cids: Sequence[int],
        server_round: int,
        take: Callable[[list[Tensor]], T],
        proximal_mu: float = 0.0,
    ) -> list[tuple[T, TrainResult]]:
        """Train a copy of the model for each client; for each, in the order asked, what `take` made of its tensors.

        `state` holds the model's tensors in state_dict order, and `take` gets a client's in the same order, in
        memory that is used again: it must copy what it keeps. A client's result is that of `train`, whatever the
        other clients.
        """

    def train_personal(self, model: nn.Module, center: Sequence[Tensor], cid: int, server_round: int) -> TrainResult:
        """Train a client's personal model in place, pulled to the global model `center`, in state_dict order."""

    def train_personal_many(
        self,
        center: Sequence[Tensor],
        starts: Sequence[Sequence[Tensor] | None],
        cids: Sequence[int],
        server_round: int,
        take: Callable[[list[Tensor]], T],
    ) -> list[tuple[T, TrainResult]]:
        """Train each client's personal model from its start, None being `center`; `take` as in `train_many`."""

    def evaluate(self, model: nn.Module, cids: Sequence[int], split: SplitName = "test") -> Evaluation:
        """Evaluate the model on one of the splits of some clients."""

    def scores(self, found: Evaluation) -> NDArray[np.float64]:
        """Return `metric` of each client, (n,); NaN where it has nothing to test on."""

    def summary(self, found: Evaluation) -> dict[str, float]:
        """Return further metrics of the model over all these clients together, as far as `found` has their sums."""

    def details(self, found: Evaluation) -> Mapping[str, NDArray[np.float64]]:
        """Return further metrics of each client by name, each (n,); NaN where it has nothing to test on.

        The names are always the same, and none is `metric` or loss.
        """


@dataclass(frozen=True, eq=False)
class Example:
    """A slice of a test subject: what is true and what a model predicts.

    Parameters
    ----------
    subject : str
        Name.
    client : int
        Whose subject it is.
    modality : str
        Of the image.
    plane : int
        Index of the slice.
    image : ndarray of float32, shape (h, w)
        Intensities; the lowest is background.
    truth, prediction : ndarray of bool, shape (3, h, w)
        Whole tumour, tumour core, enhancing tumour.
    """

    subject: str
    client: int
    modality: str
    plane: int
    image: NDArray[np.float32]
    truth: NDArray[np.bool_]
    prediction: NDArray[np.bool_]


@runtime_checkable
class Illustrated(Protocol):
    """A task that can show what its model does."""

    def examples(self, model: nn.Module, count: int) -> Sequence[Example]:
        """Return at most `count` slices of test subjects, the same ones for the same task, in the same order."""
