"""Multi-response linear regression: each client's exact least-squares fit or SGD, judged by R² and by the truth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from client_apps import attacks
from client_apps.config import choice, only_known_keys, read
from client_apps.data.linear import LinearConfig, LinearProblem, generate, least_squares, members
from client_apps.errors import ConfigError
from client_apps.tasks.base import Evaluation, SplitName
from client_apps.tasks.dealt import DealtTask, Split
from client_apps.training import SGD, TrainResult, descend, isolated_rng, seed_of

# Sets the random stream of personal training apart; not 0, which a seed cannot be told from.
_PERSONAL = 1


class RegressionTask(DealtTask[range]):
    """Clients with a linear model each (`client_apps.data.linear`), and how each estimates it and tests it.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration. Read are `seed`, `num_clients`, `dataset` (`LinearConfig`), `model`, whose only key
        is the name `linear`: a matrix, (q, p), in float32; `client` (`ClientConfig`) and `task.solver`:

        - "ols" (the default): a client sends its exact least-squares fit, whatever it received; one local step;
        - "sgd": it descends from what it received on the mean squared error over samples and responses.

    Attributes
    ----------
    attackers : frozenset of int
        Contaminated clients: those of `dataset.contaminated`, honest but with a row space of their own, and those of
        `client.attack`.

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range, or does not go with the others.
    """

    metric = "r2"
    sums: Mapping[str, tuple[int, ...]] = MappingProxyType(
        dict.fromkeys(("squared_error", "squared_total", "estimation_error"), ())
    )
    vectorized = False

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__(cfg)
        self.dataset = read(LinearConfig, cfg["dataset"], "dataset")
        self.attackers = self.attackers | members(self.dataset.contaminated, self.num_clients)
        section = cfg.get("task", {})
        only_known_keys(section, ["name", "solver"], "task")
        self.solver: str = section.get("solver", "ols")
        choice("task.solver", self.solver, ["ols", "sgd"])
        if not isinstance(self._model_config, Mapping) or self._model_config.get("name") != "linear":
            raise ConfigError(f"model={self._model_config!r} cannot learn dataset=linear; use model=linear.")
        only_known_keys(self._model_config, ["name"], "model")
        if self.client.vectorize is True:
            raise ConfigError("client.vectorize=true is not for dataset=linear; use client.vectorize=auto.")
        if self.solver == "ols":
            if self.dataset.n < self.dataset.p:
                raise ConfigError(
                    f"dataset.n={self.dataset.n} samples do not determine dataset.p={self.dataset.p} coefficients; "
                    "raise n, lower p or use task.solver=sgd."
                )
            if self.personal:
                raise ConfigError(
                    "client.ditto_lambda needs task.solver=sgd: exact least squares is pulled to no model; set that or "
                    "client.ditto_lambda=null."
                )

    def check(self) -> None:
        """Draw the clients' matrices and look for the device.

        Raises
        ------
        ConfigError
            There is no such device.
        """
        _ = self.problem, self.device

    @cached_property
    def problem(self) -> LinearProblem:
        """The clients' true matrices, and their samples."""
        options = self.dataset
        return generate(
            self.seed,
            self.num_clients,
            options.contaminated,
            q=options.q,
            p=options.p,
            rank=options.rank,
            n=options.n,
            noise=options.noise,
            signal=options.signal,
            contamination=options.contamination,
            heterogeneity=options.heterogeneity,
        )

    def new_model(self) -> nn.Module:
        """Make the initial model on the CPU, bit for bit the same for the same seed: its one tensor is (q, p)."""
        with isolated_rng(self.seed, torch.device("cpu")):
            return nn.Linear(self.dataset.p, self.dataset.q, bias=False)

    def train(self, model: nn.Module, cid: int, server_round: int, proximal_mu: float = 0.0) -> TrainResult:
        """Fit the model in place to a client's training samples, by `solver`.

        Parameters
        ----------
        model : nn.Module
            Moved to `device`.
        cid : int
            Client, from 0.
        server_round : int
            Round, from 1; with SGD the learning rate is lr * lr_decay^(server_round - 1).
        proximal_mu : float
            FedProx's μ, as in `client_apps.training.descend`; with exact least squares 0.

        Returns
        -------
        TrainResult
            Its `train_loss` is a mean squared error over samples and responses: of the fit itself with exact least
            squares, over the steps with SGD.

        Raises
        ------
        ConfigError
            The strategy asks for a proximal term, and the solver is exact.
        """
        if self.solver == "sgd":
            seed, sgd = seed_of(self.seed, cid, server_round), self._sgd(server_round, proximal_mu)
            return self._descend(model, cid, seed, self.client.local_epochs, sgd, None)
        if proximal_mu:
            raise ConfigError(
                f"proximal_mu={proximal_mu:g} needs task.solver=sgd: exact least squares is pulled to no model; set "
                "that or use another strategy."
            )
        x, y = self._training(cid)
        fit = least_squares(x, y)
        model.to(self.device)
        with torch.no_grad():
            next(model.parameters()).copy_(torch.from_numpy(fit))
        return TrainResult(len(x), float(np.mean((y - x @ fit.T) ** 2)), local_steps=1, step_weight=1.0)

    def train_personal(self, model: nn.Module, center: Sequence[Tensor], cid: int, server_round: int) -> TrainResult:
        """Train a client's personal model in place: Ditto, as `ClassificationTask.train_personal`; with SGD only."""
        sgd, epochs = self._ditto(server_round)
        center = [tensor.to(self.device) for tensor in center]
        return self._descend(model, cid, seed_of(self.seed, cid, server_round, _PERSONAL), epochs, sgd, center)

    def evaluate(self, model: nn.Module, cids: Sequence[int], split: SplitName = "test") -> Evaluation:
        """Evaluate the model on the test or the training samples of some clients, in float64.

        Parameters
        ----------
        model : nn.Module
            Moved to `device` and left in evaluation mode.
        cids : Sequence[int]
            Clients, from 0.
        split : {"test", "train"}
            Which of each client's splits.

        Returns
        -------
        Evaluation
            A sample's loss is its mean squared error over the responses. The sums, (n,) in float64, are over samples
            and responses `squared_error` and `squared_total`, the latter about each response's mean over the split,
            and once for each client `estimation_error`, ‖W − W_k‖_F² to the client's true matrix.
        """
        model.to(self.device).eval()
        weight = next(model.parameters()).detach().cpu().double().numpy()
        sizes = np.empty(len(cids), np.int64)
        error, total, estimation = (np.empty(len(cids)) for _ in range(3))
        for row, cid in enumerate(cids):
            x, y = self._training(cid) if split == "train" else self._held_out(cid)
            sizes[row] = len(x)
            error[row] = np.sum((y - x @ weight.T) ** 2)
            total[row] = np.sum((y - y.mean(axis=0)) ** 2)
            estimation[row] = np.sum((weight - self.problem.weights[cid]) ** 2)
        sums = {"squared_error": error, "squared_total": total, "estimation_error": estimation}
        return Evaluation(sizes, error / self.dataset.q, sums)

    def scores(self, found: Evaluation) -> NDArray[np.float64]:
        """Return R² of each client, 1 − squared_error/squared_total; 0 where that is negative."""
        error, total = found.sums["squared_error"], found.sums["squared_total"]
        shares: NDArray[np.float64] = np.divide(error, total, out=np.full(len(total), np.nan), where=total > 0)
        return np.maximum(1.0 - shares, 0.0)

    def summary(self, found: Evaluation) -> dict[str, float]:
        """Return `estimation_error`, the mean over these clients of the squared distance to their true matrices."""
        if "estimation_error" not in found.sums or not len(found.num_examples):
            return {}
        return {"estimation_error": float(found.sums["estimation_error"].mean())}

    def details(self, found: Evaluation) -> dict[str, NDArray[np.float64]]:
        """Return `estimation_error` of each client, (n,); NaN where `found` lacks it."""
        unknown = np.full(len(found.num_examples), np.nan)
        return {"estimation_error": np.asarray(found.sums.get("estimation_error", unknown), np.float64)}

    @cached_property
    def _splits(self) -> list[Split[range]]:
        n, test = self.dataset.n, self.dataset.test_samples
        return [Split(range(n), range(n, n + test))] * self.num_clients

    def _training(self, cid: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return a client's training samples, (n, p) and (n, q); shuffled responses where that is the attack."""
        x, y = self.problem.samples(cid, "train", len(self._split(cid).train))
        if self.client.attack == attacks.SHUFFLED_LABELS and cid in self.client.attacking(self.num_clients):
            y = y[attacks.shuffled(len(y), self.seed, cid)]
        return x, y

    def _held_out(self, cid: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.problem.samples(cid, "test", len(self._split(cid).test))

    def _descend(
        self, model: nn.Module, cid: int, seed: int, epochs: int, sgd: SGD, center: Sequence[Tensor] | None
    ) -> TrainResult:
        x, y = (torch.from_numpy(array).float().to(self.device) for array in self._training(cid))
        generator = torch.Generator().manual_seed(seed)
        model.to(self.device).train()

        def losses() -> Iterator[tuple[Tensor, int]]:
            for _ in range(epochs):
                order = torch.randperm(len(x), generator=generator).to(self.device)
                for batch in torch.split(order, self.client.batch_size):
                    yield F.mse_loss(model(x[batch]), y[batch]), len(batch)

        return descend(model, losses(), sgd, num_examples=len(x), center=center)
