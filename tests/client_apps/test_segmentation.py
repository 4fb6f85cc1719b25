"""The segmentation task: scores against NumPy and SciPy, reproducible training, evaluation, and what it refuses."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters
from monai.data.utils import compute_importance_map
from scipy.ndimage import binary_erosion, distance_transform_edt
from torch import Tensor, nn

from client_apps.app import TaskClient
from client_apps.arrays import get_arrays, set_arrays
from client_apps.data import fets2022
from client_apps.errors import ConfigError
from client_apps.models import build as build_classifier
from client_apps.models import build_volumetric
from client_apps.tasks import Evaluation, build
from client_apps.tasks.segmentation import SegmentationTask, dice_and_hd95
from experiments.evaluation import Evaluator

from . import fets
from .configs import config as classification
from .fets import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir that no test changes."""
    path = tmp_path_factory.mktemp("fets")
    fets.write(path)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(task: SegmentationTask, cid: int, server_round: int = 1, mu: float = 0.0) -> list[np.ndarray]:
    model = task.new_model()
    task.train(model, cid, server_round, mu)
    return get_arrays(model)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# Scores of a subject


def surface(mask: np.ndarray) -> np.ndarray:
    return mask & ~binary_erosion(mask)


def hd95(one: np.ndarray, other: np.ndarray, spacing: Sequence[float]) -> float:
    """The larger 95th percentile of the distances from one surface to the other, by distance transforms in float64."""
    edges = surface(one), surface(other)
    away = [distance_transform_edt(~edge, sampling=spacing) for edge in edges]
    return max(np.percentile(away[1][edges[0]], 95), np.percentile(away[0][edges[1]], 95))


def blob(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    grid = np.stack(np.meshgrid(*(np.arange(size) for size in shape), indexing="ij"))
    centre, radii = rng.uniform(0, shape), rng.uniform(1.5, 6, 3)
    ball = (((grid - centre[:, None, None, None]) / radii[:, None, None, None]) ** 2).sum(0) <= 1
    return ball | (rng.random(shape) < 0.002)  # and some specks


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 1.0, 3.0)], ids=str)
def test_scores_are_those_of_distance_transforms(seed: int, spacing: tuple[float, ...]) -> None:
    rng = np.random.default_rng(seed)
    prediction, truth = (np.stack([blob(rng, (16, 14, 12)) for _ in range(3)]) for _ in range(2))
    dice, distance = dice_and_hd95(torch.from_numpy(prediction), torch.from_numpy(truth), spacing)
    for c in range(3):
        overlap = 2 * (prediction[c] & truth[c]).sum() / (prediction[c].sum() + truth[c].sum())
        assert dice[c] == pytest.approx(overlap, abs=1e-6)
        assert distance[c] == pytest.approx(hd95(prediction[c], truth[c], spacing), rel=1e-5, abs=1e-5)
    assert dice.dtype == distance.dtype == np.float64


def test_scores_worked_by_hand() -> None:
    prediction, truth = torch.zeros(3, 8, 8, 8, dtype=torch.bool), torch.zeros(3, 8, 8, 8, dtype=torch.bool)
    prediction[0, 1, 1, 1], truth[0, 1, 4, 5] = True, True  # 3 and 4 voxels apart, of 2 and 1 mm
    prediction[1, 2:4, 2:4, 2:4] = truth[1, 2:4, 2:4, 2:4] = True  # equal
    prediction[2, 0:4, 0, 0], truth[2, 2:4, 0, 0] = True, True  # at the border; 2 of 4 voxels, 1 and 2 mm away
    dice, distance = dice_and_hd95(prediction, truth, (1.0, 2.0, 1.0))
    assert dice.tolist() == pytest.approx([0, 1, 2 * 2 / 6])
    # From the four voxels of the prediction the distances are 0, 0, 1, 2: their 95th percentile is 1 + .85.
    assert distance.tolist() == pytest.approx([math.hypot(6, 4), 0, 1.85])


def test_scores_of_empty_masks_are_those_of_brats() -> None:
    empty = torch.zeros(3, 240, 240, 155, dtype=torch.bool)
    other = empty.clone()
    other[1, 100, 100, 100] = True
    for one, two in ((empty, other), (other, empty)):
        dice, distance = dice_and_hd95(one, two, (1.0, 1.0, 1.0))
        assert dice.tolist() == [1, 0, 1]
        assert distance.tolist() == pytest.approx([0, 373.13, 0], abs=5e-3)  # BraTS' penalty
    _, distance = dice_and_hd95(empty[:, :3, :4, :12], other[:, 100:103, 100:104, 100:112], (1.0, 1.0, 1.0))
    assert distance[1] == pytest.approx(13)  # 3, 4 and 12 mm


# Splits and initial model


@pytest.mark.parametrize(
    ("fraction", "cap", "train", "test"),
    [(0.2, None, 8, 2), (0.01, None, 9, 1), (0.99, None, 1, 9), (0, None, 10, 0), (0.2, 5, 4, 1), (0.2, 1, 1, 0)],
)
def test_split_sizes(tmp_path: Path, fraction: float, cap: int | None, train: int, test: int) -> None:
    root = tmp_path / fets2022.FOLDER
    root.mkdir()
    fets.write_csv(root / "partitioning_1.csv", {1: [f"s{number}" for number in range(10)], 2: ["t"]})
    cfg = config(tmp_path, num_clients=2, dataset__test_fraction=fraction, dataset__max_samples=cap)
    task = SegmentationTask(cfg)
    assert (task.train_size(0), task.test_size(0)) == (train, test)
    assert (task.train_size(1), task.test_size(1)) == (1, 0)
    split = task._split(0)
    assert not set(split.train) & set(split.test)
    assert set(split.train) | set(split.test) <= {f"s{number}" for number in range(10)}


def test_splits_depend_on_seed_and_client_and_not_on_the_order_of_rows(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(20)]
    splits = []
    for place, order in (("one", 1), ("other", -1)):
        root = tmp_path / place
        root.mkdir()
        fets.write_csv(root / "partitioning_1.csv", {7: names[::order], 8: [f"t{name}" for name in names[::order]]})
        splits.append([SegmentationTask(config(root, num_clients=2))._split(cid) for cid in range(2)])
    assert splits[0] == splits[1]
    assert {f"t{name}" for name in splits[0][0].test} != set(splits[0][1].test)
    other = SegmentationTask(config(tmp_path / "one", num_clients=2, seed=1))
    assert other._split(0) != splits[0][0]


def test_the_initial_model_depends_on_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(1)
    first = get_arrays(SegmentationTask(config(folder)).new_model())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = get_arrays(SegmentationTask(config(folder)).new_model())
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    assert not same(first, get_arrays(SegmentationTask(config(folder, seed=1)).new_model()))


@pytest.mark.parametrize("norm", ["instance", "group"])
@pytest.mark.parametrize("units", [0, 2])
def test_the_model_maps_modalities_to_classes_without_a_state(norm: str, units: int) -> None:
    cfg = {"name": "unet3d", "channels": [3, 4, 6], "norm": norm, "num_res_units": units, "dropout": 0.1}
    model = build_volumetric(cfg, inputs=2, classes=3, patch=[8, 12, 16])
    assert model(torch.zeros(1, 2, 8, 12, 16)).shape == (1, 3, 8, 12, 16)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


# Training


def test_the_loss_is_dice_and_focal(folder: Path) -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(2, 3, 4, 5, 6)), rng.integers(0, 2, (2, 3, 4, 5, 6))
    y[0, 1] = 0  # a class that does not occur
    p = 1 / (1 + np.exp(-z))
    axes = (2, 3, 4)
    dice = 1 - (2 * (p * y).sum(axes) + 1e-5) / (p.sum(axes) + y.sum(axes) + 1e-5)
    right = np.where(y == 1, p, 1 - p)
    focal = -((1 - right) ** 2) * np.log(right)
    loss = SegmentationTask(config(folder))._loss(torch.from_numpy(z), torch.from_numpy(y).double())
    assert float(loss) == pytest.approx(dice.mean() + focal.mean(), rel=1e-6)


def test_training_is_bitwise_the_same_in_any_order_and_with_any_cache(folder: Path) -> None:
    state = torch.get_rng_state()
    first = SegmentationTask(config(folder, dataset__cache_subjects=None, dataset__test_fraction=0))
    forwards = [trained(first, cid) for cid in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    second = SegmentationTask(config(folder, dataset__cache_subjects=1, dataset__test_fraction=0))
    torch.manual_seed(9)
    backwards = [trained(second, cid) for cid in reversed(range(3))][::-1]
    assert all(same(one, other) for one, other in zip(forwards, backwards, strict=True))
    assert not same(forwards[0], forwards[1])
    assert not same(forwards[0], trained(first, 0, server_round=2))


def test_an_epoch_takes_every_subject_as_often_and_mixes_them(folder: Path) -> None:
    task = SegmentationTask(config(folder, dataset__patches_per_subject=5))
    names = [f"s{number}" for number in range(20)]
    order = task._order(names, np.random.default_rng(0))
    assert sorted(order) == sorted(names * 5)
    for start, count in ((0, 8), (40, 8), (80, 4)):
        assert len(set(order[start : start + 5 * count])) == count  # no more than 8 at a time have to be kept
    assert order[:5] != [order[0]] * 5


def test_the_learning_rate_decays_by_round(folder: Path) -> None:
    decayed = SegmentationTask(config(folder, client__lr=0.1, client__lr_decay=0.5))
    constant = SegmentationTask(config(folder, client__lr=0.025))
    assert same(trained(decayed, 0, 3), trained(constant, 0, 3))


class Reference:
    """Training by torch.optim.SGD on the whole objective, proximal term and all, with the task's own batches."""

    def __init__(self, task: SegmentationTask, cid: int, seed: int, epochs: int) -> None:
        self.batches = list(task._batches(task._split(cid).train, seed, epochs))

    def train(self, model: nn.Module, loss: Any, mu: float, center: Sequence[Tensor], **options: float) -> list[float]:
        optimiser = torch.optim.SGD(model.parameters(), **options)
        losses = []
        for images, masks in self.batches:
            optimiser.zero_grad()
            value = loss(model(images), masks)
            losses += [value.item()] * len(images)
            pull = sum(((w - c) ** 2).sum() for w, c in zip(model.parameters(), center, strict=True))
            (value + mu / 2 * pull).backward()
            optimiser.step()
        return losses


@pytest.mark.parametrize("mu", [0.0, 3.0])
def test_training_follows_the_objective(folder: Path, mu: float) -> None:
    cfg = config(
        folder,
        dataset__patches_per_subject=3,
        dataset__test_fraction=0,
        client__local_epochs=2,
        client__batch_size=4,
        client__weight_decay=0.01,
        client__lr=0.05,
    )
    task = SegmentationTask(cfg)
    model, other = task.new_model(), task.new_model()
    result = task.train(model, 0, 1, mu)
    seed = int(np.random.SeedSequence([0, 0, 1]).generate_state(1, np.uint64)[0]) >> 1
    reference = Reference(task, 0, seed, epochs=2)
    start = [p.detach().clone() for p in other.parameters()]
    losses = reference.train(other, task._loss, mu, start, lr=0.05, momentum=0.9, weight_decay=0.01)
    assert [len(images) for images, _ in reference.batches] == [4, 2, 4, 2]
    torch.testing.assert_close(get_arrays(model), get_arrays(other), rtol=1e-4, atol=1e-5)
    assert (result.num_examples, result.local_steps) == (2, 4)
    assert result.train_loss == pytest.approx(np.mean(losses), rel=1e-4)


def test_fedprox_changes_the_result_and_mu_0_does_not(folder: Path) -> None:
    task = SegmentationTask(config(folder, client__local_epochs=2))
    plain, zero, pulled = (trained(task, 0, mu=mu) for mu in (0.0, 0, 5.0))
    assert same(plain, zero)
    assert not same(plain, pulled)
    start = get_arrays(task.new_model())

    def moved(arrays: list[np.ndarray]) -> float:
        return sum(float(((a - b) ** 2).sum()) for a, b in zip(arrays, start, strict=True))

    assert moved(pulled) < moved(plain)


def test_a_personal_model_is_pulled_to_the_global_one(folder: Path) -> None:
    task = SegmentationTask(config(folder, client__ditto_lambda=2.0, client__ditto_epochs=3, client__lr=0.05))
    assert task.personal
    center = [tensor + 0.01 for tensor in task.new_model().state_dict().values()]
    kept = [tensor.clone() for tensor in center]
    model, other = task.new_model(), task.new_model()
    result = task.train_personal(model, center, 1, 1)
    seed = int(np.random.SeedSequence([0, 1, 1, 1]).generate_state(1, np.uint64)[0]) >> 1
    Reference(task, 1, seed, epochs=3).train(other, task._loss, 2.0, center, lr=0.05, momentum=0.9)
    torch.testing.assert_close(get_arrays(model), get_arrays(other), rtol=1e-4, atol=1e-5)
    assert result.local_steps == 3
    assert all(torch.equal(one, two) for one, two in zip(center, kept, strict=True))
    assert not same(get_arrays(model), trained(task, 1))  # other patches, and another objective


def test_personal_models_need_their_lambda(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    assert not task.personal
    with pytest.raises(ConfigError, match=r"only where client.ditto_lambda is a number; set it"):
        task.train_personal(task.new_model(), [], 0, 1)


def test_clients_are_never_trained_in_stacks(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    assert task.vectorized is False
    with pytest.raises(NotImplementedError, match="one by one"):
        task.train_many([], [0], 1, len)
    with pytest.raises(NotImplementedError, match="one by one"):
        task.train_personal_many([], [], [0], 1, len)


def test_federated_averaging_learns_the_blobs(folder: Path, device: str) -> None:
    cfg = config(
        folder,
        dataset__patches_per_subject=6,
        dataset__tumour_share=0.7,
        client__lr=0.2,
        client__device=device,
        model__channels=[8, 16],
    )
    task = SegmentationTask(cfg)
    model = task.new_model()
    before = task.evaluate(model, range(3))
    arrays, losses = get_arrays(model), []
    for server_round in range(1, 7):
        updates = []
        for cid in range(3):
            set_arrays(model, arrays)
            losses.append(task.train(model, cid, server_round).train_loss)
            updates.append(get_arrays(model))
        arrays = [np.mean(each, axis=0) for each in zip(*updates, strict=True)]
    set_arrays(model, arrays)
    after = task.evaluate(model, range(3))
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert after.loss_sum.sum() < 0.8 * before.loss_sum.sum()
    assert task.summary(after)["dice_wt"] > 0.6
    assert task.summary(after)["hd95"] < task.summary(before)["hd95"]


# Evaluation


def test_evaluation_follows_the_definition(folder: Path) -> None:
    # The brain fits into one window, whose logits are then the model's own.
    task = SegmentationTask(config(folder, dataset__patch=[24, 24, 24], dataset__test_fraction=0.5))
    model = task.new_model()
    task.train(model, 0, 1)
    found = task.evaluate(model, [1])
    (name,) = task._split(1).test
    stored = fets.arrays(int(name[-5:]))
    subject = task._subject(name)
    size = subject.image.shape[1:]
    low = [(24 - edge) // 2 for edge in size]
    box = tuple(slice(start, start + edge) for start, edge in zip(low, size, strict=True))
    padded = torch.zeros(2, 24, 24, 24)
    padded[(slice(None), *box)] = subject.image
    with torch.inference_mode():
        logits = model.eval()(padded[None])[0][(slice(None), *box)]
    truth = np.stack([np.isin(stored["seg"], labels) for labels in ((1, 2, 4), (1, 4), (4,))])
    prediction = np.zeros(truth.shape, bool)
    inside = tuple(slice(start, start + edge) for start, edge in zip(subject.start, size, strict=True))
    prediction[(slice(None), *inside)] = torch.sigmoid(logits).numpy() > 0.5
    dice = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in zip(prediction, truth, strict=True)]
    assert prediction.any(axis=(1, 2, 3)).all()
    np.testing.assert_allclose(found.sums["dice_sum"], [dice], atol=1e-5)
    distances = [hd95(a, b, (1, 1, 1)) for a, b in zip(prediction, truth, strict=True)]
    np.testing.assert_allclose(found.sums["hd95_sum"], [distances], rtol=1e-5)
    masks = torch.from_numpy(truth[(slice(None), *inside)]).float()
    assert found.loss_sum[0] == pytest.approx(float(task._loss(logits[None], masks[None])), rel=1e-5)
    assert found.num_examples.dtype == np.int64
    assert found.loss_sum.dtype == found.sums["dice_sum"].dtype == np.float64


class Ramp(nn.Module):
    """Logits that depend on where in its window a voxel lies, so that every window gives it others."""

    def forward(self, images: Tensor) -> Tensor:
        ramp = torch.linspace(-2, 3, images[0, 0].numel()).reshape(images.shape[2:])
        return torch.stack([images[:, 0] + ramp, images[:, 1] * ramp, ramp.flip(0) - images[:, 0]], dim=1)


def test_windows_overlap_and_are_blended_with_gaussian_weights(folder: Path) -> None:
    patch, step = (8, 12, 8), (4, 6, 4)
    cfg = config(folder, dataset__patch=list(patch), dataset__window_overlap=0.5, dataset__window_batch=3)
    task, model = SegmentationTask(cfg), Ramp()
    (name,) = task._split(0).test
    subject = fets2022.load(folder / fets2022.FOLDER, name, ["flair", "t1ce"])
    weights = compute_importance_map(patch, mode="gaussian", sigma_scale=0.125)
    total, weight = torch.zeros(3, *subject.image.shape[1:]), torch.zeros(subject.image.shape[1:])
    starts = [
        sorted({min(start, size - window) for start in range(0, size - window + stride, stride)})
        for size, window, stride in zip(subject.image.shape[1:], patch, step, strict=True)
    ]
    assert min(map(len, starts)) > 1
    for start in product(*starts):
        box = tuple(slice(low, low + window) for low, window in zip(start, patch, strict=True))
        total[(slice(None), *box)] += weights * model(subject.image[(slice(None), *box)][None])[0]
        weight[box] += weights
    expected = total / weight
    torch.testing.assert_close(task._logits(model, subject), expected, rtol=1e-4, atol=1e-4)
    truth = fets2022.to_classes(subject.label[0]).float()
    assert task.evaluate(model, [0]).loss_sum[0] == pytest.approx(
        float(task._loss(expected[None], truth[None])), rel=1e-4
    )


def test_windows_are_the_same_however_many_pass_together(folder: Path) -> None:
    tasks = [
        SegmentationTask(config(folder, dataset__patch=[8, 8, 8], dataset__window_batch=count)) for count in (1, 4)
    ]
    model = tasks[0].new_model()
    subject = tasks[0]._subject(fets.SUBJECTS[0])
    assert min(subject.image.shape[1:]) > 8
    one, four = (task._logits(model, subject) for task in tasks)
    torch.testing.assert_close(one, four, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("modalities", [["flair"], ["flair", "t1ce"], list(fets2022.MODALITIES)], ids="-".join)
def test_a_step_with_any_modalities(folder: Path, modalities: list[str]) -> None:
    task = SegmentationTask(config(folder, dataset__modalities=modalities))
    model = task.new_model()
    before = get_arrays(model)
    result = task.train(model, 0, 1)
    assert (result.num_examples, result.local_steps) == (1, 1)
    assert math.isfinite(result.train_loss)
    assert next(model.parameters()).shape[1] == len(modalities)
    assert all(np.isfinite(array).all() for array in get_arrays(model))
    changed = (get_arrays(model)[0] != before[0]).any(axis=(0, 2, 3, 4))
    assert changed.tolist() == [True] * len(modalities)  # every channel reaches the loss


def test_all_clients_at_once_count_what_each_counts_alone(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    model = task.new_model()
    at_once = task.evaluate(model, [2, 0, 1])
    assert at_once.num_examples.tolist() == [0, 1, 1]
    for row, cid in enumerate([2, 0, 1]):
        alone = task.evaluate(model, [cid])
        assert at_once.loss_sum[row] == alone.loss_sum[0]
        for key in task.sums:
            np.testing.assert_array_equal(at_once.sums[key][row], alone.sums[key][0])
    assert np.isnan(task.scores(at_once)).tolist() == [True, False, False]
    train = task.evaluate(model, [0, 1, 2], "train")
    assert train.num_examples.tolist() == [1, 1, 1]
    assert (train.loss_sum > 0).all()


def test_nothing_to_evaluate_is_allowed(folder: Path) -> None:
    task = SegmentationTask(config(folder, dataset__test_fraction=0))
    found = task.evaluate(task.new_model(), [0, 1])
    assert found.num_examples.tolist() == found.loss_sum.tolist() == [0, 0]
    assert np.isnan(task.scores(found)).all()
    assert task.summary(found) == {}
    assert all(np.isnan(column).all() for column in task.details(found).values())


def test_scores_are_means_over_clients_and_the_summary_over_subjects(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    dice, distance = np.array([[0.9, 0.6, 0.3], [1.5, 1.2, 0.9]]), np.array([[3.0, 6, 9], [6, 9, 12]])
    found = Evaluation(np.array([1, 3]), np.array([1.0, 2.0]), {"dice_sum": dice, "hd95_sum": distance})
    assert task.metric == "dice"
    assert task.metric not in task.sums
    assert task.scores(found).tolist() == pytest.approx([0.6, 0.4])
    summary = {"dice_wt": 0.6, "dice_tc": 0.45, "dice_et": 0.3}
    summary |= {"hd95": 3.75, "hd95_wt": 2.25, "hd95_tc": 3.75, "hd95_et": 5.25}
    assert task.summary(found) == pytest.approx(summary)
    assert task.summary(Evaluation(found.num_examples, found.loss_sum, {"dice_sum": dice})) == {}


def test_details_are_means_over_the_subjects_of_each_client(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    dice = np.array([[0.9, 0.6, 0.3], [0, 0, 0], [1.5, 1.2, 0.9]])
    distance = np.array([[3.0, 6, 9], [0, 0, 0], [6, 9, 12]])
    found = Evaluation(np.array([1, 0, 3]), np.array([1.0, 0.0, 2.0]), {"dice_sum": dice, "hd95_sum": distance})
    expected = {"dice_wt": [0.9, 0.5], "dice_tc": [0.6, 0.4], "dice_et": [0.3, 0.3]}
    expected |= {"hd95_wt": [3, 2], "hd95_tc": [6, 3], "hd95_et": [9, 4]}
    details = task.details(found)
    assert list(details) == list(expected)
    for name, (first, last) in expected.items():
        np.testing.assert_allclose(details[name], [first, math.nan, last])
        assert details[name].dtype == np.float64
    classes = [details[name] for name in ("dice_wt", "dice_tc", "dice_et")]
    np.testing.assert_allclose(np.mean(classes, axis=0), task.scores(found))
    lacking = task.details(Evaluation(found.num_examples, found.loss_sum, {"dice_sum": dice}))
    assert list(lacking) == list(expected)  # the columns of a run do not change with what clients report
    assert np.isnan(lacking["hd95_et"]).all()


def test_a_model_trains_after_it_was_evaluated(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    model = task.new_model()
    task.evaluate(model, [0], "train")
    task.train(model, 0, 1)
    assert same(get_arrays(model), trained(SegmentationTask(config(folder)), 0))


def test_a_model_that_has_diverged_scores_nothing(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    model = task.new_model()
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    found = task.evaluate(model, [0])
    assert math.isnan(found.loss_sum[0])
    assert found.sums["dice_sum"].tolist() == [[0, 0, 0]]


def test_clients_report_what_the_server_finds(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    seen: list[Any] = []
    evaluator = Evaluator(task, 3, lambda *found: seen.append(found))
    arrays = get_arrays(task.new_model())
    loss, metrics = evaluator.on_server(1, arrays, {})
    results = []
    for cid in range(3):
        answer = TaskClient(task, cid).evaluate(EvaluateIns(ndarrays_to_parameters(arrays), {}))
        alone = task.evaluate(task.new_model(), [cid])
        assert json.loads(answer.metrics["dice_sum"]) == alone.sums["dice_sum"][0].tolist()
        results.append((answer.num_examples, answer.metrics))
    evaluator.start_round(1)
    assert evaluator.from_clients(results) == metrics
    (*server, of_server), (*clients, of_clients) = seen
    for one, other in zip([*server, *of_server.values()], [*clients, *of_clients.values()], strict=True):
        np.testing.assert_array_equal(one, other)
    assert list(of_server) == list(of_clients) == [f"{kind}_{c}" for kind in ("dice", "hd95") for c in fets2022.CLASSES]
    assert np.isfinite(list(of_server.values())).all()
    assert {"dice", "dice_std", "dice_weighted", "dice_wt", "hd95", "hd95_et"} <= set(metrics)
    assert loss > 0


def test_a_client_trains_what_it_receives(folder: Path) -> None:
    task = SegmentationTask(config(folder, client__ditto_lambda=1.0))
    arrays = get_arrays(task.new_model())
    ins = FitIns(ndarrays_to_parameters(arrays), {"server_round": 1, "initial_loss": True, "proximal_mu": 0.1})
    client = TaskClient(task, 0)
    answer = client.fit(ins)
    assert answer.num_examples == 1
    assert answer.metrics["initial_loss"] == task.evaluate(task.new_model(), [0], "train").loss_sum[0]
    assert answer.metrics["personal_loss"] > 0
    assert "personal_dice" in client.evaluate(EvaluateIns(ndarrays_to_parameters(arrays), {})).metrics


# Pictures


def test_examples_show_the_largest_tumours_of_different_clients(folder: Path) -> None:
    task = SegmentationTask(config(folder, dataset__test_fraction=0.5))
    model = task.new_model()
    found = task.examples(model, 5)
    tests = {name: cid for cid in range(3) for name in task._split(cid).test}
    sizes = {name: (fets.arrays(int(name[-5:]))["seg"] > 0).sum() for name in tests}
    assert [example.subject for example in found] == sorted(tests, key=lambda name: -sizes[name])
    assert [example.client for example in found] == [tests[example.subject] for example in found]
    assert [example.subject for example in task.examples(model, 1)] == [found[0].subject]
    for example in found:
        stored = fets.arrays(int(example.subject[-5:]))
        wt = stored["seg"] > 0
        assert wt[:, :, example.plane].sum() == wt.sum((0, 1)).max()
        assert example.modality == "flair"
        np.testing.assert_array_equal(example.image, stored["flair"][:, :, example.plane].T)
        np.testing.assert_array_equal(example.truth[0], wt[:, :, example.plane].T)
        np.testing.assert_array_equal(example.truth[2], stored["seg"][:, :, example.plane].T == 4)
        assert example.prediction.shape == example.truth.shape == (3, 24, 24)
        assert example.image.dtype == np.float32
        assert example.prediction.dtype == example.truth.dtype == bool


def test_examples_take_turns(tmp_path: Path) -> None:
    fets.write(tmp_path, {1: [f"FeTS2022_0000{n}" for n in range(1, 6)], 2: ["FeTS2022_00006", "FeTS2022_00007"]})
    task = SegmentationTask(config(tmp_path, num_clients=2, dataset__test_fraction=0.9))
    found = task.examples(task.new_model(), 4)
    assert sorted(example.client for example in found[:2]) == [0, 1]
    assert [example.client for example in found[2:]] == [0, 0]


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "mlp"}}, r"model.name=mlp classifies images; dataset=fets2022 needs unet3d"),
        ({"model": {"name": "unet"}}, r"model.name must be one of unet3d, not 'unet'"),
        ({"model": {"channels": [4, 8]}}, r"model.name is missing; set it to one of unet3d"),
        ({"model__width": 3}, r"model.width is not a known key; the known ones are: name, channels, num_res_units"),
        ({"model__channels": [4]}, r"model.channels must be a list of at least two widths, not \[4\]"),
        ({"model__channels": [4, 0]}, r"each of model.channels must be an integer of at least 1, not 0"),
        ({"model__num_res_units": -1}, r"model.num_res_units must be an integer of at least 0"),
        ({"model__norm": "batch"}, r"model.norm must be one of instance, group, not 'batch'"),
        ({"model__dropout": 1}, r"model.dropout must be a number of at least 0 and below 1"),
        (
            {"model__channels": [4, 8, 8], "dataset__patch": [16, 18, 16]},
            r"dataset.patch=\[16, 18, 16\] must be divisible by 4, the total stride of a U-Net of 3 levels; choose",
        ),
        ({"dataset__patch": [2, 2, 2]}, r"dataset.patch=\[2, 2, 2\] leaves one voxel at the bottom of a U-Net of 2"),
        ({"dataset__patch": [16, 16]}, r"dataset.patch must be a list of three sizes in voxels, not \[16, 16\]"),
        ({"dataset__patch": [16, 16, 0]}, r"each of dataset.patch must be an integer of at least 1, not 0"),
        ({"dataset__modalities": []}, r"dataset.modalities must be a list of at least one of flair, t1, t1ce, t2"),
        ({"dataset__modalities": "flair"}, r"dataset.modalities must be a list of at least one of"),
        ({"dataset__modalities": ["t1c"]}, r"each of dataset.modalities must be one of flair, t1, t1ce, t2, not 't1c'"),
        ({"dataset__modalities": ["t1", "t1"]}, r"dataset.modalities=\['t1', 't1'\] names one twice; remove it"),
        (
            {"dataset__partition__kind": "iid"},
            r"dataset.partition.kind=iid is not for dataset=fets2022, .* use natural",
        ),
        ({"dataset__partition__beta": 1}, r"dataset.partition.beta is not a known key"),
        ({"dataset__partitioning": "../x.csv"}, r"dataset.partitioning must be the name of a CSV file beside"),
        ({"dataset__partitioning": 1}, r"dataset.partitioning must be the name of a CSV file beside .*, not 1"),
        ({"dataset__patches_per_subject": 0}, r"dataset.patches_per_subject must be an integer of at least 1"),
        ({"dataset__tumour_share": 1.5}, r"dataset.tumour_share must be a number from 0 to 1, not 1.5"),
        ({"dataset__augment": "crop_flip"}, r"dataset.augment must be one of none, flip"),
        ({"dataset__cache_subjects": 0}, r"dataset.cache_subjects must be an integer of at least 1"),
        ({"dataset__window_overlap": 1}, r"dataset.window_overlap must be a number of at least 0 and below 1"),
        ({"dataset__window_batch": 0}, r"dataset.window_batch must be an integer of at least 1"),
        ({"dataset__test_fraction": 1}, r"dataset.test_fraction must be a number of at least 0 and below 1"),
        ({"dataset__max_samples": 0}, r"dataset.max_samples must be an integer of at least 1"),
        ({"dataset__hub": "x"}, r"dataset.hub is not a known key; the known ones are: name, partition, partitioning"),
        ({"client__vectorize": True}, r"client.vectorize=true is not for dataset=fets2022; use client.vectorize=auto"),
        ({"client__lr": 0}, r"client.lr must be a number above 0"),
        ({"num_clients": 0}, r"num_clients must be an integer of at least 1"),
        ({"seed": -1}, r"seed must be an integer of at least 0"),
    ],
    ids=str,
)
def test_wrong_configurations_are_refused_without_reading_data(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config(None, **changes))


def test_a_missing_section_is_named(folder: Path) -> None:
    cfg = config(folder)
    del cfg["client"]
    with pytest.raises(ConfigError, match="client is missing; set it in the configuration"):
        build(cfg)


def test_a_classifier_and_a_segmenter_do_not_swap_places() -> None:
    with pytest.raises(ConfigError, match=r"unet3d segments volumes, dataset=fets2022; choose one of mlp, cnn, resnet"):
        build(classification(model={"name": "unet3d"}))
    with pytest.raises(ConfigError, match=r"unet3d segments volumes"):
        build_classifier({"name": "unet3d"}, channels=1, side=8, num_classes=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 4}, r"num_clients=4 exceeds the 3 institutions of .*partitioning_1.csv; set num_clients=3 or"),
        ({"data_dir": None}, r"FeTS2022 needs a Synapse account; set data_dir"),
        ({"dataset__partitioning": "partitioning_2.csv"}, r"There is no partitioning_2.csv in .*: partitioning_1.csv;"),
        ({"client__device": "cuda:99"}, r"cuda:99 is not there: PyTorch sees \d+ GPUs; use client.device=auto"),
        ({"client__device": "gpu"}, r"client.device must be auto, cpu, cuda or cuda:<index>, not 'gpu'"),
    ],
    ids=str,
)
def test_check_refuses_what_could_stop_a_client_later(folder: Path, changes: dict[str, Any], message: str) -> None:
    task = build(config(folder, **changes))
    with pytest.raises(ConfigError, match=message):
        task.check()


@pytest.mark.parametrize(("clients", "told"), [(1, "the last 2 of the 3"), (2, "the last 1 of the 3"), (3, None)])
def test_institutions_that_are_left_out_are_told(
    folder: Path, clients: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    task = SegmentationTask(config(folder, num_clients=clients))
    with caplog.at_level(logging.WARNING):
        task.train_size(0)
        task.train_size(0)
    expected = [f"num_clients={clients} leaves out {told} institutions of"] if told else []
    assert [record.getMessage().partition(" /")[0] for record in caplog.records] == expected


def test_check_accepts_what_runs(folder: Path) -> None:
    task = build(config(folder))
    assert isinstance(task, SegmentationTask)
    task.check()
    assert build(config(folder)) is task


def test_only_what_is_used_has_to_be_there(tmp_path: Path) -> None:
    root = fets.write(tmp_path, modalities=["flair"])
    (root / "FeTS2022_00005" / "FeTS2022_00005_seg.nii.gz").unlink()
    build(config(tmp_path, num_clients=2, dataset__modalities=["flair"])).check()
    with pytest.raises(ConfigError, match=r"has no FeTS2022_00005_seg\.nii\.gz"):
        build(config(tmp_path, dataset__modalities=["flair"])).check()
    with pytest.raises(ConfigError, match=r"the modality t1ce of .*; put it there, leave the modality out of"):
        build(config(tmp_path, num_clients=2)).check()


def test_a_file_that_is_damaged_later_stops_the_client_with_the_same_sentence(tmp_path: Path) -> None:
    root = fets.write(tmp_path, {1: ["FeTS2022_00001"]}, modalities=["flair"])
    file = root / "FeTS2022_00001" / "FeTS2022_00001_flair.nii.gz"
    file.write_bytes(file.read_bytes()[:-200])
    task = SegmentationTask(config(tmp_path, num_clients=1, dataset__modalities=["flair"]))
    with pytest.raises(ConfigError, match=r"FeTS2022_00001_flair\.nii\.gz is not a readable NIfTI file") as checked:
        task.check()
    model = task.new_model()
    for use in (lambda: task.train(model, 0, 1), lambda: task.evaluate(model, [0], "train")):
        with pytest.raises(ConfigError) as used:
            use()
        assert str(used.value) == str(checked.value)


def test_clients_have_numbers_below_num_clients(folder: Path) -> None:
    task = SegmentationTask(config(folder))
    for cid in (-1, 3):
        with pytest.raises(ConfigError, match=f"no client {cid}: num_clients=3"):
            task.train_size(cid)


@pytest.mark.parametrize("library", ["monai", "nibabel"])
def test_without_the_extra_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for module in ("client_apps.tasks.segmentation", "client_apps.data.fets2022"):
        monkeypatch.delitem(sys.modules, module)
    for module in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=r"dataset=fets2022 needs monai and nibabel; pip install 'fedconcord\[fets\]'"
    ):
        build(config(None, seed=12345))


def test_everything_else_works_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['monai'] = sys.modules['nibabel'] = None\n"
        "from tests.client_apps.configs import config\n"
        "from client_apps import tasks, models, data; tasks.build(config())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# Real subjects


def test_real_subjects_train_and_evaluate(data_dir: Path) -> None:
    cfg = config(
        data_dir / "fets2022_2mm",
        num_clients=5,
        dataset__partitioning="partitioning_flair_t1ce.csv",
        dataset__patch=[32, 32, 32],
    )
    task = SegmentationTask(cfg)
    task.check()
    assert [(task.train_size(cid), task.test_size(cid)) for cid in range(5)] == [(1, 1)] * 4 + [(1, 0)]
    model = task.new_model()
    result = task.train(model, 1, 1)
    assert (result.num_examples, result.local_steps) == (1, 1)
    assert 0.5 < result.train_loss < 2.5
    found = task.evaluate(model, [1, 4])
    assert found.num_examples.tolist() == [1, 0]
    assert 0 <= task.scores(found)[0] <= 1
    assert 0 < task.summary(found)["hd95"] <= math.dist((0, 0, 0), (240, 240, 154))
