"""Image classification: cross-entropy and accuracy on any data set of `client_apps.data`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from client_apps import attacks, data, models
from client_apps.config import DatasetConfig, choice, integer, read
from client_apps.data.partition import partition
from client_apps.data.transforms import Normalise, random_crop_flip
from client_apps.errors import ConfigError
from client_apps.stacked_linear import StackedLinearNetwork
from client_apps.tasks.base import Evaluation, SplitName, quotient
from client_apps.tasks.dealt import DealtTask, Split
from client_apps.training import SGD, TrainResult, isolated_rng, local_sgd, seed_of
from client_apps.vectorized import VectorizedTraining, Work, obstacle

T = TypeVar("T")

# Sets the random stream of personal training apart; not 0, which a seed cannot be told from.
_PERSONAL = 1


class ClassificationTask(DealtTask[NDArray[np.int64]]):
    """A data set dealt to clients, a model, and how each client trains and tests it.

    Constructing checks the configuration and reads no data; the data is read when first needed.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration. Read are `seed`, `num_clients`, `data_dir`, `dataset`
        (`DatasetConfig`), `model` (`client_apps.models.build`), `client` (`ClientConfig`) and
        `evaluation.batch_size` (1024). With `client.attack=shuffled_labels` all that looks at the training splits of
        contaminated clients sees shuffled labels: training, personal training, and the evaluation of the training
        split, from which `initial_loss` comes. Test splits are as they are.

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range, or the model does not fit the images.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__(cfg)
        self.dataset = read(DatasetConfig, cfg["dataset"], "dataset")
        self.eval_batch_size: int = (cfg.get("evaluation") or {}).get("batch_size", 1024)
        integer("evaluation.batch_size", self.eval_batch_size, 1)
        choice("dataset.name", self.dataset.name, [*data.SOURCES, "fets2022", "copying", "linear"])
        self.source = data.SOURCES[self.dataset.name]
        self.metric = "accuracy"
        self.sums: Mapping[str, tuple[int, ...]] = {"correct": (), "class_counts": (3, self.source.num_classes)}
        self.vectorized: bool = self._vectorizes(self.new_model())  # new_model refuses a model that does not fit

    def check(self) -> None:
        """Read and deal the data and look for the device.

        Raises
        ------
        ConfigError
            The data is missing or damaged, does not suffice for the clients, or there is no such device.
        """
        _ = self._splits, self.device

    def new_model(self) -> nn.Module:
        """Make the initial model on the CPU, bit for bit the same for the same seed."""
        with isolated_rng(self.seed, torch.device("cpu")):
            return models.build(
                self._model_config,
                channels=self.source.channels,
                side=self.source.side,
                num_classes=self.source.num_classes,
            )

    def train(self, model: nn.Module, cid: int, server_round: int, proximal_mu: float = 0.0) -> TrainResult:
        """Train the model in place on a client's training split.

        Everything random is drawn from (seed, cid, server_round), so on a CPU with one thread the result
        is the same bit for bit wherever and in whatever order clients run.

        Parameters
        ----------
        model : nn.Module
            Moved to `device`.
        cid : int
            Client, from 0.
        server_round : int
            Round, from 1; the learning rate is lr * lr_decay^(server_round - 1).
        proximal_mu : float
            FedProx's μ: the objective is F(w) + (μ/2)‖w − w_t‖², with w_t the model as it comes in.
        """
        self._place(model)
        if self.vectorized:
            # The code that trains groups, so that engines with and without groups agree bit for bit.
            state = list(model.state_dict().values())
            ((_, result),) = self.train_many(state, [cid], server_round, partial(_copy, state), proximal_mu)
            return result
        return self._train_one(model, self._work(cid, server_round), None, self._sgd_options(server_round, proximal_mu))

    def train_many(
        self,
        state: Sequence[Tensor],
        cids: Sequence[int],
        server_round: int,
        take: Callable[[list[Tensor]], T],
        proximal_mu: float = 0.0,
    ) -> list[tuple[T, TrainResult]]:
        """Train a copy of the model for each client, many at once; only where `vectorized`.

        Where `client.vectorize=auto` allows it, a client's result on a CPU with one thread does not depend on the
        others, bit for bit; see `client_apps.vectorized`.

        Parameters
        ----------
        state : sequence of Tensor
            The global model in state_dict order; not changed.
        cids : sequence of int
            Clients, from 0.
        server_round : int
            Round, from 1.
        take : Callable
            Called once for each client with its trained tensors in state_dict order, on `device`. They lie in
            memory that is used again: it must copy what it keeps.
        proximal_mu : float
            As in `train`.

        Returns
        -------
        list
            For each client, in the order asked, what `take` returned, and its TrainResult.
        """
        works = [self._work(cid, server_round) for cid in cids]
        return self._train_stack(state, works, take, self._sgd_options(server_round, proximal_mu))

    def train_personal(self, model: nn.Module, center: Sequence[Tensor], cid: int, server_round: int) -> TrainResult:
        """Train a client's personal model in place: Ditto (Li et al. 2021, arXiv 2012.04221, algorithm 1).

        A step is v <- v - lr (∇F(v) + λ (v - w)), with w the global model as the client received it, λ
        `client.ditto_lambda`, and all else as in `train`. What is random comes from a stream of its own, drawn from
        (seed, cid, server_round).

        Parameters
        ----------
        model : nn.Module
            v; moved to `device`.
        center : sequence of Tensor
            w, in state_dict order; not changed.
        cid : int
            Client, from 0.
        server_round : int
            Round, from 1.
        """
        self._place(model)
        if self.vectorized:
            state = list(model.state_dict().values())
            ((_, result),) = self.train_personal_many(center, [state], [cid], server_round, partial(_copy, state))
            return result
        center = [tensor.to(self.device) for tensor in center]
        return self._train_one(
            model, self._work(cid, server_round, _PERSONAL), center, self._ditto_options(server_round)
        )

    def train_personal_many(
        self,
        center: Sequence[Tensor],
        starts: Sequence[Sequence[Tensor] | None],
        cids: Sequence[int],
        server_round: int,
        take: Callable[[list[Tensor]], T],
    ) -> list[tuple[T, TrainResult]]:
        """Train the personal models of many clients at once, as `train_personal` does; only where `vectorized`.

        Parameters
        ----------
        center : sequence of Tensor
            The global model that all received, in state_dict order; not changed.
        starts : sequence
            Each client's personal model so far in state_dict order, not changed; None is `center`.
        cids : sequence of int
            Clients, from 0.
        server_round : int
            Round, from 1.
        take : Callable
            As in `train_many`.

        Returns
        -------
        list
            For each client, in the order asked, what `take` returned, and its TrainResult.
        """
        works = [
            self._work(cid, server_round, _PERSONAL)._replace(start=start)
            for cid, start in zip(cids, starts, strict=True)
        ]
        return self._train_stack(center, works, take, self._ditto_options(server_round))

    def evaluate(self, model: nn.Module, cids: Sequence[int], split: SplitName = "test") -> Evaluation:
        """Evaluate the model on the test or the training splits of some clients, all in one pass, without augmentation.

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
            Its sums are `correct`, (n,), the samples classified correctly, and `class_counts`, (n, 3, classes), for
            each class the samples of it classified correctly, those classified as it, and those of it; all int64.
        """
        parts: list[NDArray[np.int64]] = [getattr(self._split(cid), split) for cid in cids]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        indices = np.concatenate([*parts, np.empty(0, np.int64)])
        # Tensors made in inference mode cannot be trained, so model and normalisation get ready before.
        self._place(model)
        model.eval()
        normalise = self._normalise
        predicted, truth, losses = [], [], []
        with torch.inference_mode():
            for start in range(0, max(len(indices), 1), self.eval_batch_size):
                images, labels = self._tensors(indices[start : start + self.eval_batch_size])
                logits = model(normalise(images))
                predicted.append(logits.argmax(1))
                truth.append(labels)
                losses.append(F.cross_entropy(logits, labels, reduction="none"))
        owner = np.repeat(np.arange(len(sizes)), sizes)
        guess, label = (torch.cat(column).cpu().numpy() for column in (predicted, truth))
        loss = torch.cat(losses).double().cpu().numpy()
        right = guess == label
        classes = (len(sizes), self.source.num_classes)
        counts = [_tally(owner[right], label[right], classes), _tally(owner, guess, classes)]
        return Evaluation(
            num_examples=sizes,
            loss_sum=np.bincount(owner, weights=loss, minlength=len(sizes)).astype(np.float64),
            sums={
                "correct": np.bincount(owner[right], minlength=len(sizes)).astype(np.int64),
                "class_counts": np.stack([*counts, _tally(owner, label, classes)], axis=1),
            },
        )

    def scores(self, found: Evaluation) -> NDArray[np.float64]:
        """Return the accuracy of each client."""
        return quotient(found.sums["correct"], found.num_examples)

    def summary(self, found: Evaluation) -> dict[str, float]:
        """Return `macro_f1`, the unweighted mean of the classes' F1 over the test samples of all clients.

        F1 of a class is 2 TP / (samples classified as it + samples of it); a class without either does not count, as
        in scikit-learn's `f1_score(average="macro")`.
        """
        if "class_counts" not in found.sums:
            return {}
        hits, guessed, held = found.sums["class_counts"].sum(axis=0)
        occurs = guessed + held > 0
        if not occurs.any():
            return {}
        return {"macro_f1": float(np.mean(2 * hits[occurs] / (guessed + held)[occurs]))}

    def details(self, found: Evaluation) -> dict[str, NDArray[np.float64]]:
        """Return nothing: a client's accuracy is all there is."""
        return {}

    @cached_property
    def _samples(self) -> data.Samples:
        return data.load(self.dataset.name, self.data_dir, self.dataset.hub)

    @cached_property
    def _labels(self) -> NDArray[np.int64]:
        """Labels of all samples, each of which is in one split at most; shuffled where that is the attack."""
        labels = self._samples.labels
        if self.client.attack == attacks.SHUFFLED_LABELS and self.attackers:
            labels = labels.copy()  # the samples are shared with other tasks
            for cid in self.attackers:
                train = self._split(cid).train
                labels[train] = labels[train[attacks.shuffled(len(train), self.seed, cid)]]
        return labels

    @cached_property
    def _splits(self) -> list[Split[NDArray[np.int64]]]:
        parts = partition(
            self._samples.labels,
            self._samples.owners,
            num_clients=self.num_clients,
            seed=self.seed,
            **self.dataset.partition,
        )
        return [self._split_locally(cid, part) for cid, part in enumerate(parts)]

    def _split_locally(self, cid: int, part: NDArray[np.int64]) -> Split[NDArray[np.int64]]:
        split = self._hold_out(cid, len(part), self.dataset.max_samples, self.dataset.test_fraction)
        return Split(*(part[positions] for positions in split))

    def _vectorizes(self, model: nn.Module) -> bool:
        if self.client.vectorize == "auto":
            return obstacle(model) is None and StackedLinearNetwork.of(model) is not None
        if self.client.vectorize and (found := obstacle(model)) is not None:
            raise ConfigError(
                f"client.vectorize=true cannot train a model with {found}; use client.vectorize=auto or another model."
            )
        return bool(self.client.vectorize)

    @cached_property
    def _vectorized_training(self) -> VectorizedTraining:
        return VectorizedTraining(self.new_model().to(self.device))

    def _place(self, model: nn.Module) -> None:
        """Move the model to the device; the walk that finds nothing to move costs a tenth of a small step."""
        here = next(model.parameters()).device
        if here.type != self.device.type or self.device.index not in (None, here.index):
            model.to(self.device)

    def _train_one(
        self, model: nn.Module, work: Work, center: Sequence[Tensor] | None, options: dict[str, Any]
    ) -> TrainResult:
        images, labels, seed, _ = work
        return local_sgd(model, images, labels, seed=seed, transform=self._training_input, center=center, **options)

    def _train_stack(
        self,
        state: Sequence[Tensor],
        works: Sequence[Work],
        take: Callable[[list[Tensor]], T],
        options: dict[str, Any],
    ) -> list[tuple[T, TrainResult]]:
        augment = random_crop_flip if self.dataset.augment == "crop_flip" else None
        return self._vectorized_training.train(
            state, works, take, augment=augment, normalise=self._normalise, **options
        )

    def _sgd_options(self, server_round: int, proximal_mu: float = 0.0) -> dict[str, Any]:
        return self._options(self._sgd(server_round, proximal_mu), self.client.local_epochs)

    def _ditto_options(self, server_round: int) -> dict[str, Any]:
        return self._options(*self._ditto(server_round))

    def _options(self, sgd: SGD, epochs: int) -> dict[str, Any]:
        return {**sgd._asdict(), "epochs": epochs, "batch_size": self.client.batch_size}

    def _work(self, cid: int, server_round: int, *stream: int) -> Work:
        return Work(*self._tensors(self._split(cid).train), seed=seed_of(self.seed, cid, server_round, *stream))

    def _tensors(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(self._samples.images[indices])
        return images.to(self.device), torch.from_numpy(self._labels[indices]).to(self.device)

    @cached_property
    def _normalise(self) -> Normalise:
        return Normalise(self.source.mean, self.source.std, self.device)

    def _training_input(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if self.dataset.augment == "crop_flip":
            images = random_crop_flip(images, generator)
        return self._normalise(images)


def _tally(owners: NDArray[np.int64], classes: NDArray[np.int64], shape: tuple[int, int]) -> NDArray[np.int64]:
    """Count samples by owner and class, (owners, classes)."""
    counts = np.bincount(owners * shape[1] + classes, minlength=shape[0] * shape[1])
    return counts.reshape(shape).astype(np.int64)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
