"""DealtTask: what tasks share whose samples are dealt to clients, each of whom holds some of its own out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_apps.config import ClientConfig, integer, read
from client_apps.errors import ConfigError
from client_apps.training import SGD, TrainResult, find_device

Those = TypeVar("Those", bound=Sized)
T = TypeVar("T")

_KEYS = ("seed", "num_clients", "dataset", "model", "client")


class Split(NamedTuple, Generic[Those]):
    """The samples of one client: indices or names."""

    train: Those
    test: Those


class DealtTask(ABC, Generic[Those]):
    """A number of clients, their splits, and how they train.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration. Read are `seed`, `num_clients`, `data_dir` and `client` (`ClientConfig`).

    Raises
    ------
    ConfigError
        A key is missing or out of range.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        for key in _KEYS:
            if key not in cfg:
                raise ConfigError(f"{key} is missing; set it in the configuration.")
        integer("seed", cfg["seed"], 0)
        integer("num_clients", cfg["num_clients"], 1)
        self.seed: int = cfg["seed"]
        self.num_clients: int = cfg["num_clients"]
        self.data_dir: str | None = cfg.get("data_dir")
        self.client = read(ClientConfig, cfg["client"], "client")
        self.attackers = self.client.attacking(self.num_clients)
        self._model_config = cfg["model"]

    @property
    @abstractmethod
    def _splits(self) -> Sequence[Split[Those]]:
        """The split of each client; a cached property, that reads data at first."""

    @cached_property
    def device(self) -> torch.device:
        """Where models are trained and evaluated."""
        return find_device(self.client.device)

    def train_size(self, cid: int) -> int:
        """Size of a client's training split, at least 1."""
        return len(self._split(cid).train)

    def test_size(self, cid: int) -> int:
        """Size of a client's test split, possibly 0."""
        return len(self._split(cid).test)

    @property
    def personal(self) -> bool:
        """Whether clients train a personal model, too: `client.ditto_lambda` is set."""
        return self.client.ditto_lambda is not None

    def train_many(
        self,
        state: Sequence[Tensor],
        cids: Sequence[int],
        server_round: int,
        take: Callable[[list[Tensor]], T],
        proximal_mu: float = 0.0,
    ) -> list[tuple[T, TrainResult]]:
        """Raise NotImplementedError, except of a task that can be `vectorized`, which overrides this."""
        raise NotImplementedError(f"{type(self).__name__} trains clients one by one; call train.")

    def train_personal_many(
        self,
        center: Sequence[Tensor],
        starts: Sequence[Sequence[Tensor] | None],
        cids: Sequence[int],
        server_round: int,
        take: Callable[[list[Tensor]], T],
    ) -> list[tuple[T, TrainResult]]:
        """Raise NotImplementedError, except of a task that can be `vectorized`, which overrides this."""
        raise NotImplementedError(f"{type(self).__name__} trains clients one by one; call train_personal.")

    def _split(self, cid: int) -> Split[Those]:
        if not 0 <= cid < self.num_clients:
            raise ConfigError(
                f"There is no client {cid}: num_clients={self.num_clients}, numbered from 0; "
                "raise num_clients or use a smaller number."
            )
        return self._splits[cid]

    def _hold_out(
        self, cid: int, count: int, max_samples: int | None, test_fraction: float
    ) -> Split[NDArray[np.int64]]:
        """Shuffle a client's samples, keep at most `max_samples`, and hold some out: positions of both, in order.

        Held out is the rounded test_fraction, at least 1 of 2 or more, and at least 1 is left to train on.
        """
        order = np.random.default_rng([self.seed, cid]).permutation(count)[:max_samples]
        held_out = 0
        if test_fraction > 0 and len(order) >= 2:
            held_out = min(max(round(len(order) * test_fraction), 1), len(order) - 1)
        return Split(train=np.sort(order[held_out:]), test=np.sort(order[:held_out]))

    def _sgd(self, server_round: int, proximal_mu: float = 0.0) -> SGD:
        options = self.client
        lr = options.lr * options.lr_decay ** (server_round - 1)
        return SGD(lr, options.momentum, options.weight_decay, proximal_mu)

    def _ditto(self, server_round: int) -> tuple[SGD, int]:
        """Return options and epochs of personal training."""
        strength, epochs = self.client.ditto_lambda, self.client.ditto_epochs
        if strength is None:
            raise ConfigError("Personal models are trained only where client.ditto_lambda is a number; set it.")
        return self._sgd(server_round, strength), self.client.local_epochs if epochs is None else epochs
