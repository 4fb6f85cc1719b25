"""Tumour segmentation on FeTS2022: Dice and focal loss on patches, Dice and 95 % Hausdorff distance on volumes."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceFocalLoss
from monai.metrics import compute_dice, compute_hausdorff_distance
from numpy.typing import NDArray
from torch import Tensor, nn

from client_apps import attacks, models
from client_apps.config import read
from client_apps.data import fets2022
from client_apps.data.fets2022 import CLASSES, FetsConfig, Patches, Subject
from client_apps.errors import ConfigError
from client_apps.tasks.base import Evaluation, Example, SplitName, quotient
from client_apps.tasks.dealt import DealtTask, Split
from client_apps.training import SGD, TrainResult, descend, isolated_rng, seed_of

log = logging.getLogger(__name__)

# Sets the random stream of personal training apart; not 0, which a seed cannot be told from.
_PERSONAL = 1
# Subjects whose patches are mixed: all at once would not fit in memory, and one at a time would give batches of one
# brain. Not the size of the cache, on which no result may depend.
_MIXED = 8


class SegmentationTask(DealtTask[tuple[str, ...]]):
    """Institutions with their subjects, a U-Net, and how each institution trains and tests it.

    Constructing checks the configuration and reads no data; subjects are read when they are needed.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration. Read are `seed`, `num_clients`, `data_dir`, `dataset` (`FetsConfig`), `model`
        (`client_apps.models.build_volumetric`) and `client` (`ClientConfig`).

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range, or the model does not fit the patches.
    """

    metric = "dice"
    sums: Mapping[str, tuple[int, ...]] = MappingProxyType(dict.fromkeys(("dice_sum", "hd95_sum"), (len(CLASSES),)))
    vectorized = False

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__(cfg)
        self.dataset = read(FetsConfig, cfg["dataset"], "dataset")
        if self.client.vectorize is True:
            raise ConfigError("client.vectorize=true is not for dataset=fets2022; use client.vectorize=auto.")
        if self.client.attack == attacks.SHUFFLED_LABELS:
            raise ConfigError(
                "client.attack=shuffled_labels is not for dataset=fets2022, which has masks, not labels; choose "
                "another attack."
            )
        self.new_model()  # refuses a model that does not fit
        self._loss = DiceFocalLoss(sigmoid=True, gamma=2.0)
        self._subject = lru_cache(maxsize=self.dataset.cache_subjects)(self._load)

    def check(self) -> None:
        """Read all files of all clients and look for the device.

        Raises
        ------
        ConfigError
            Data is missing or damaged, does not suffice for the clients, or there is no such device.
        """
        subjects = [subject for split in self._splits for part in split for subject in part]
        fets2022.check(self._root, subjects, self.dataset.modalities)
        _ = self.device

    def new_model(self) -> nn.Module:
        """Make the initial model on the CPU, bit for bit the same for the same seed."""
        with isolated_rng(self.seed, torch.device("cpu")):
            return models.build_volumetric(
                self._model_config,
                inputs=len(self.dataset.modalities),
                classes=len(CLASSES),
                patch=self.dataset.patch,
            )

    def train(self, model: nn.Module, cid: int, server_round: int, proximal_mu: float = 0.0) -> TrainResult:
        """Train the model in place on patches of a client's training subjects.

        The loss is that of Dice plus the focal loss with γ = 2 (Lin et al. 2017, arXiv 1708.02002), each a mean over
        the three classes, and the focal loss over voxels, too (MONAI's DiceFocalLoss). The Dice loss is
        1 − (2 Σpy + 1e-5)/(Σp + Σy + 1e-5) for each patch and class: about 1, without a gradient to speak of, where a
        class does not occur in a patch, whose voxels the focal loss alone then trains.

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

        Returns
        -------
        TrainResult
            Its `num_examples` is the number of training subjects, and its `train_loss` a mean over patches.
        """
        seed = seed_of(self.seed, cid, server_round)
        return self._train(model, cid, seed, self.client.local_epochs, self._sgd(server_round, proximal_mu), None)

    def train_personal(self, model: nn.Module, center: Sequence[Tensor], cid: int, server_round: int) -> TrainResult:
        """Train a client's personal model in place: Ditto, as `ClassificationTask.train_personal`.

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
        sgd, epochs = self._ditto(server_round)
        seed = seed_of(self.seed, cid, server_round, _PERSONAL)
        center = [tensor.to(self.device) for tensor in center]
        return self._train(model, cid, seed, epochs, sgd, center)

    def evaluate(self, model: nn.Module, cids: Sequence[int], split: SplitName = "test") -> Evaluation:
        """Segment the whole volumes of the test or the training subjects of some clients, one after the other.

        A subject's logits are those of windows that slide over the bounding box of its brain, blended with Gaussian
        weights; outside the box nothing is predicted. Its loss is that of `train` on these logits, in the box; its
        scores are those of `dice_and_hd95` in the whole volume.

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
            Examples are subjects. Its sums are `dice_sum` and `hd95_sum`, (n, 3) in float64, the latter in mm, for
            whole tumour, tumour core and enhancing tumour.
        """
        sizes = np.zeros(len(cids), np.int64)
        loss_sum = np.zeros(len(cids))
        dice_sum, hd95_sum = np.zeros((len(cids), len(CLASSES))), np.zeros((len(cids), len(CLASSES)))
        for row, cid in enumerate(cids):
            subjects: tuple[str, ...] = getattr(self._split(cid), split)
            sizes[row] = len(subjects)
            for name in subjects:
                subject = self._subject(name)  # before inference mode, whose tensors cannot be trained on
                logits = self._logits(model, subject)
                with torch.inference_mode():
                    truth = fets2022.to_classes(subject.label[0]).to(logits)
                    loss_sum[row] += float(self._loss(logits[None], truth[None]))
                prediction, masks = subject.whole(logits > 0), fets2022.to_classes(torch.from_numpy(subject.truth))
                del logits, truth  # the distances need memory of their own
                dice, hd95 = dice_and_hd95(prediction, masks, subject.spacing)
                dice_sum[row] += dice
                hd95_sum[row] += hd95
        return Evaluation(sizes, loss_sum, {"dice_sum": dice_sum, "hd95_sum": hd95_sum})

    def scores(self, found: Evaluation) -> NDArray[np.float64]:
        """Return the Dice coefficient of each client, the mean over its subjects and the three classes."""
        return quotient(found.sums["dice_sum"].mean(axis=1), found.num_examples)

    def summary(self, found: Evaluation) -> dict[str, float]:
        """Return means over the test subjects of all clients, each subject counting once.

        They are `dice_wt`, `dice_tc`, `dice_et`, and in mm `hd95_wt`, `hd95_tc`, `hd95_et`, and their mean `hd95`.
        """
        count = int(found.num_examples.sum())
        if not count or any(key not in found.sums for key in self.sums):
            return {}
        dice, hd95 = (found.sums[key].sum(axis=0) / count for key in self.sums)
        means = {f"dice_{name}": float(value) for name, value in zip(CLASSES, dice, strict=True)}
        return (
            means
            | {"hd95": float(hd95.mean())}
            | {f"hd95_{name}": float(value) for name, value in zip(CLASSES, hd95, strict=True)}
        )

    def details(self, found: Evaluation) -> dict[str, NDArray[np.float64]]:
        """Return means over each client's subjects, (n,); NaN where there are none, or `found` lacks their sums.

        They are `dice_wt`, `dice_tc`, `dice_et`, and in mm `hd95_wt`, `hd95_tc`, `hd95_et`.
        """
        unknown = np.full((len(found.num_examples), len(CLASSES)), np.nan)
        return {
            f"{kind}_{name}": quotient(found.sums.get(f"{kind}_sum", unknown)[:, column], found.num_examples)
            for kind in ("dice", "hd95")
            for column, name in enumerate(CLASSES)
        }

    def examples(self, model: nn.Module, count: int) -> list[Example]:
        """Segment test subjects for pictures: of each, the axial slice with the most of its whole tumour.

        Parameters
        ----------
        model : nn.Module
            Moved to `device` and left in evaluation mode.
        count : int
            At most so many. First come the test subjects with the largest tumour of each client, by its size; then
            those with the second largest, and so on.

        Returns
        -------
        list of Example
            Seen from the feet as radiologists do: front up, right on the left. Of the first of `dataset.modalities`,
            intensities as stored.
        """
        found = []
        for cid, name in self._by_tumour[:count]:
            subject = self._subject(name)
            prediction = subject.whole(self._logits(model, subject) > 0)
            truth = fets2022.to_classes(torch.from_numpy(subject.truth))
            plane = int(truth[0].sum(dim=(0, 1)).argmax())
            modality = self.dataset.modalities[0]
            # FeTS volumes are stored right to left, front to back, feet to head.
            found.append(
                Example(
                    subject=name,
                    client=cid,
                    modality=modality,
                    plane=plane,
                    image=np.ascontiguousarray(fets2022.raw_plane(self._root, name, modality, plane).T),
                    truth=np.ascontiguousarray(truth[..., plane].numpy().transpose(0, 2, 1)),
                    prediction=np.ascontiguousarray(prediction[..., plane].numpy().transpose(0, 2, 1)),
                )
            )
        return found

    @cached_property
    def _by_tumour(self) -> list[tuple[int, str]]:
        """Clients and test subjects in the order of `examples`."""
        ranked = []
        for cid, split in enumerate(self._splits):
            sizes = {name: fets2022.tumour_size(self._root, name) for name in split.test}
            ranked.append([(-sizes[name], cid, name) for name in sorted(sizes, key=lambda name: (-sizes[name], name))])
        return [(cid, name) for rank in zip_longest(*ranked) for _, cid, name in sorted(filter(None, rank))]

    @cached_property
    def _root(self) -> Path:
        return fets2022.find_root(self.data_dir, self.dataset.partitioning)

    @cached_property
    def _splits(self) -> list[Split[tuple[str, ...]]]:
        file = self._root / self.dataset.partitioning
        parts = fets2022.institutions(file)
        if len(parts) < self.num_clients:
            raise ConfigError(
                f"num_clients={self.num_clients} exceeds the {len(parts)} institutions of {file}; set "
                f"num_clients={len(parts)} or choose another dataset.partitioning."
            )
        if left_out := len(parts) - self.num_clients:
            log.warning(
                "num_clients=%d leaves out the last %d of the %d institutions of %s; set num_clients=%d to take all",
                *(self.num_clients, left_out, len(parts), file, len(parts)),
            )
        return [self._split_locally(cid, part) for cid, part in enumerate(parts[: self.num_clients])]

    def _split_locally(self, cid: int, subjects: Sequence[str]) -> Split[tuple[str, ...]]:
        split = self._hold_out(cid, len(subjects), self.dataset.max_samples, self.dataset.test_fraction)
        return Split(*(tuple(subjects[position] for position in positions) for positions in split))

    def _load(self, name: str) -> Subject:
        return fets2022.load(self._root, name, self.dataset.modalities)

    def _train(
        self, model: nn.Module, cid: int, seed: int, epochs: int, sgd: SGD, center: Sequence[Tensor] | None
    ) -> TrainResult:
        subjects = self._split(cid).train
        model.to(self.device).train()

        def losses() -> Iterator[tuple[Tensor, int]]:
            for images, masks in self._batches(subjects, seed, epochs):
                yield self._loss(model(images.to(self.device)), masks.to(self.device)), len(images)

        with isolated_rng(seed, self.device):
            return descend(model, losses(), sgd, num_examples=len(subjects), center=center)

    def _batches(self, subjects: Sequence[str], seed: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of patches and masks in random order, the last of an epoch perhaps smaller."""
        generator = np.random.default_rng(seed)
        patches = Patches(self.dataset, seed)
        for _ in range(epochs):
            order = self._order(subjects, generator)
            for start in range(0, len(order), self.client.batch_size):
                batch = order[start : start + self.client.batch_size]
                images, masks = zip(*(patches.draw(self._subject(name)) for name in batch), strict=True)
                yield torch.stack(images), torch.stack(masks)

    def _order(self, subjects: Sequence[str], generator: np.random.Generator) -> list[str]:
        """Return each subject `patches_per_subject` times, mixed with at most `_MIXED` − 1 others."""
        shuffled, order = generator.permutation(len(subjects)), []
        for start in range(0, len(subjects), _MIXED):
            times = np.repeat(shuffled[start : start + _MIXED], self.dataset.patches_per_subject)
            order += [subjects[index] for index in generator.permutation(times)]
        return order

    def _logits(self, model: nn.Module, subject: Subject) -> Tensor:
        """Return the logits in the box of the brain, (3, h, w, d), on `device`."""
        model.to(self.device).eval()
        with torch.inference_mode():
            logits: Tensor = sliding_window_inference(
                subject.image[None].to(self.device),
                roi_size=tuple(self.dataset.patch),
                sw_batch_size=self.dataset.window_batch,
                predictor=model,
                overlap=self.dataset.window_overlap,
                mode="gaussian",
            )[0]
            return logits


def dice_and_hd95(
    prediction: Tensor, truth: Tensor, spacing: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the Dice coefficients and the 95 % Hausdorff distances in mm of masks, as BraTS and FeTS count them.

    The distance is the larger of two, from each surface to the other, of each the 95th percentile (MONAI's). Where
    both masks are empty Dice is 1 and the distance 0; where one is, Dice is 0 and the distance the volume's diagonal:
    373.13 mm for 240x240x155 voxels of 1 mm, which is BraTS' own constant.

    Parameters
    ----------
    prediction, truth : Tensor of bool, shape (c, h, w, d)
        On the CPU.
    spacing : sequence of float
        Edges of a voxel in mm.

    Returns
    -------
    tuple of two ndarray of float64, shape (c,)
    """
    dice = compute_dice(prediction[None], truth[None], include_background=True, ignore_empty=False)[0]
    diagonal = math.dist((0, 0, 0), [size * edge for size, edge in zip(truth.shape[1:], spacing, strict=True)])
    hd95 = [_hd95(one, other, spacing, diagonal) for one, other in zip(prediction, truth, strict=True)]
    return dice.double().numpy(), np.array(hd95, np.float64)


def _hd95(prediction: Tensor, truth: Tensor, spacing: Sequence[float], diagonal: float) -> float:
    if not (prediction.any() and truth.any()):
        return diagonal if prediction.any() or truth.any() else 0.0
    # Only voxels of the masks count, so the box around both of them gives the same distances, much faster.
    either = prediction | truth
    box = []
    for axis in range(3):
        (inside,) = torch.nonzero(either.any(dim=tuple(other for other in range(3) if other != axis)), as_tuple=True)
        box.append(slice(int(inside[0]), int(inside[-1]) + 1))
    one, other = (mask[tuple(box)][None, None] for mask in (prediction, truth))
    with warnings.catch_warnings():
        # MONAI's own call of a function of its own, with an argument it has deprecated.
        warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
        distance = compute_hausdorff_distance(
            one, other, include_background=True, percentile=95, spacing=tuple(spacing)
        )
    return float(distance)
