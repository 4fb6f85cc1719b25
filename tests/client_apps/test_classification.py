"""The classification task: splits, reproducible training, evaluation, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from client_apps.arrays import get_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import ClassificationTask, build

from .configs import config

DIRICHLET = {"kind": "dirichlet", "alpha": 0.1, "min_samples": 2}


def trained(task: ClassificationTask, cid: int, server_round: int = 1) -> list[np.ndarray]:
    model = task.new_model()
    task.train(model, cid, server_round)
    return get_arrays(model)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_splits_partition_every_clients_samples() -> None:
    task = ClassificationTask(config(num_clients=100, dataset__partition=DIRICHLET))
    splits = [task._split(cid) for cid in range(100)]
    everything = np.concatenate([part for split in splits for part in split])
    np.testing.assert_array_equal(np.sort(everything), np.arange(1797))
    for split in splits:
        count = len(split.train) + len(split.test)
        assert len(split.test) == max(1, round(0.2 * count))
        assert len(split.train) >= 1


@pytest.mark.parametrize(
    ("fraction", "cap", "train", "test"),
    [(0.2, None, 8, 2), (0.01, None, 9, 1), (0.99, None, 1, 9), (0, None, 10, 0), (0.2, 5, 4, 1), (0.2, 1, 1, 0)],
)
def test_split_sizes(fraction: float, cap: int | None, train: int, test: int) -> None:
    # 1797 samples over 179 clients: 10 each, and 11 for the first few.
    task = ClassificationTask(config(num_clients=179, dataset__test_fraction=fraction, dataset__max_samples=cap))
    assert (task.train_size(178), task.test_size(178)) == (train, test)


def test_splits_depend_on_the_seed_alone() -> None:
    first, again, other = (ClassificationTask(config(seed=seed))._split(3) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.test, again.test)
    assert not np.array_equal(first.test, other.test)


def test_the_initial_model_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = get_arrays(ClassificationTask(config()).new_model())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = get_arrays(ClassificationTask(config()).new_model())
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    assert not same(first, get_arrays(ClassificationTask(config(seed=1)).new_model()))


def test_training_is_bitwise_the_same_in_any_order() -> None:
    first = ClassificationTask(config(client__momentum=0.9, dataset__augment="crop_flip"))
    forwards = [trained(first, cid) for cid in range(4)]
    second = ClassificationTask(config(client__momentum=0.9, dataset__augment="crop_flip"))
    torch.manual_seed(9)
    backwards = [trained(second, cid) for cid in reversed(range(4))][::-1]
    assert all(same(one, other) for one, other in zip(forwards, backwards, strict=True))
    assert not same(forwards[0], forwards[1])
    assert not same(forwards[0], trained(first, 0, server_round=2))


def test_the_learning_rate_decays_by_round() -> None:
    # One batch of all samples and no dropout: a step then does not depend on the round but for its length.
    task = ClassificationTask(config(client__lr_decay=0.5, client__batch_size=1000))
    start = get_arrays(task.new_model())
    first, third = trained(task, 0, 1), trained(task, 0, 3)
    for before, one, three in zip(start, first, third, strict=True):
        np.testing.assert_allclose(4 * (three - before), one - before, rtol=1e-3, atol=1e-6)


def test_a_round_of_training_lowers_the_loss(device: str) -> None:
    task = ClassificationTask(config(client__local_epochs=5, client__device=device))
    model = task.new_model()
    before = task.evaluate(model, [0])
    result = task.train(model, 0, 1)
    after = task.evaluate(model, [0])
    assert result.num_examples == task.train_size(0)
    assert result.local_steps == 5 * -(-result.num_examples // 20) == result.step_weight
    assert after.loss_sum[0] < before.loss_sum[0]
    assert after.sums["correct"][0] > before.sums["correct"][0]


def test_all_clients_at_once_count_what_each_counts_alone(device: str) -> None:
    cfg = config(num_clients=60, dataset__partition=DIRICHLET | {"min_samples": 1}, client__device=device)
    task = ClassificationTask(cfg)
    model = task.new_model()
    task.train(model, 0, 1)
    cids = list(range(60))
    at_once = task.evaluate(model, cids)
    alone = [task.evaluate(model, [cid]) for cid in cids]
    assert (at_once.num_examples == 0).any()  # a client of one sample tests on none
    assert at_once.num_examples.tolist() == [task.test_size(cid) for cid in cids]
    np.testing.assert_array_equal(at_once.sums["correct"], [one.sums["correct"][0] for one in alone])
    np.testing.assert_allclose(at_once.loss_sum, [one.loss_sum[0] for one in alone], rtol=1e-5)
    backwards = task.evaluate(model, cids[::-1])
    np.testing.assert_array_equal(backwards.sums["correct"], at_once.sums["correct"][::-1])


def test_evaluation_follows_the_definition() -> None:
    task = ClassificationTask(config())
    model = task.new_model()
    test = task._split(4).test
    logits = model(torch.from_numpy(task._samples.images[test]).float() / 255).detach().double().numpy()
    labels = task._samples.labels[test]
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(test)), labels]
    found = task.evaluate(model, [4])
    assert found.sums["correct"][0] == (logits.argmax(1) == labels).sum()
    assert found.loss_sum[0] == pytest.approx(losses.sum(), rel=1e-5)
    assert (found.num_examples.dtype, found.sums["correct"].dtype) == (np.int64, np.int64)
    assert found.loss_sum.dtype == np.float64


def test_macro_f1_is_scikit_learns_over_all_clients_samples() -> None:
    task = ClassificationTask(config())
    model = task.new_model()
    task.train(model, 0, 1)
    model.eval()
    cids = range(5)  # few enough that a class may occur in neither
    test = np.concatenate([task._split(cid).test for cid in cids])
    guessed = model(torch.from_numpy(task._samples.images[test]).float() / 255).argmax(1).numpy()
    found = task.evaluate(model, cids)
    expected = f1_score(task._samples.labels[test], guessed, average="macro", zero_division=0)
    assert task.summary(found) == {"macro_f1": pytest.approx(expected, rel=1e-12)}
    assert task.details(found) == {}
    np.testing.assert_array_equal(found.sums["class_counts"].sum(2)[:, 0], found.sums["correct"])
    np.testing.assert_array_equal(found.sums["class_counts"].sum(2)[:, 2], found.num_examples)


def test_nothing_to_evaluate_is_allowed() -> None:
    task = ClassificationTask(config(dataset__test_fraction=0))
    found = task.evaluate(task.new_model(), [0, 1])
    assert found.num_examples.tolist() == found.sums["correct"].tolist() == found.loss_sum.tolist() == [0, 0]


def test_a_model_trains_after_it_was_evaluated(device: str) -> None:
    task = ClassificationTask(config(client__device=device))
    model = task.new_model()
    task.evaluate(model, [0])
    task.train(model, 0, 1)
    assert same(get_arrays(model), trained(task, 0))


def test_equal_configurations_share_a_task() -> None:
    cfg = config()
    assert build(cfg) is build(config())
    assert build(cfg) is build({**config(), "strategy": {"name": "craft"}, "num_rounds": 3})
    assert build(cfg) is not build(config(client__lr=0.2))


def test_check_accepts_what_runs() -> None:
    ClassificationTask(config()).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__name": "resnet", "model__depth": 20}, r"model.hidden is not a known key"),
        ({"model": {"name": "resnet"}}, r"resnet needs images of at least 16x16 .* 8x8; choose model.name=mlp"),
        ({"dataset__name": "mnist"}, r"dataset.name must be one of digits, cifar10, cifar100, femnist, cinic10"),
        ({"dataset__split": 1}, r"dataset.split is not a known key; the known ones are: name, partition"),
        ({"dataset__partition__beta": 1}, r"dataset.partition.beta is not a known key"),
        ({"dataset__partition": "iid"}, r"dataset.partition must be a group of keys"),
        ({"dataset__test_fraction": 1}, r"dataset.test_fraction must be a number of at least 0 and below 1, not 1"),
        ({"dataset__test_fraction": -0.1}, r"dataset.test_fraction"),
        ({"dataset__augment": "mixup"}, r"dataset.augment must be one of none, crop_flip"),
        ({"dataset__max_samples": 0}, r"dataset.max_samples must be an integer of at least 1"),
        ({"client__mu": 1}, r"client.mu is not a known key; the known ones are: lr, batch_size"),
        ({"client": {"lr": 0.1}}, r"client.batch_size is missing"),
        ({"client__lr": 0}, r"client.lr must be a number above 0, not 0"),
        ({"client__lr": "0.1"}, r"client.lr must be a number above 0, not '0.1'"),
        ({"client__lr": float("inf")}, r"client.lr must be a number above 0"),
        ({"client__lr_decay": 0}, r"client.lr_decay must be a number above 0"),
        ({"client__momentum": 1}, r"client.momentum must be a number of at least 0 and below 1"),
        ({"client__weight_decay": -1}, r"client.weight_decay must be a number of at least 0"),
        ({"client__local_epochs": 0}, r"client.local_epochs must be an integer of at least 1"),
        ({"client__local_epochs": 1.5}, r"client.local_epochs must be an integer"),
        ({"client__batch_size": True}, r"client.batch_size must be an integer"),
        ({"evaluation__batch_size": 0}, r"evaluation.batch_size must be an integer of at least 1"),
        ({"num_clients": 0}, r"num_clients must be an integer of at least 1"),
        ({"seed": -1}, r"seed must be an integer of at least 0"),
    ],
    ids=str,
)
def test_wrong_configurations_are_refused_without_reading_data(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClassificationTask(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 1798}, r"num_clients=1798 is more than the 1797 samples"),
        ({"num_clients": 400, "dataset__partition": DIRICHLET | {"min_samples": 5}}, r"need 2000 of the 1797"),
        ({"dataset__partition": {"kind": "natural"}}, r"natural clients, and this one has none"),
        ({"client__device": "gpu"}, r"client.device must be auto, cpu, cuda or cuda:<index>, not 'gpu'"),
        ({"client__device": "cuda:99"}, r"cuda:99 is not there: PyTorch sees \d+ GPUs; use client.device=auto"),
    ],
    ids=str,
)
def test_check_refuses_what_could_stop_a_client_later(changes: dict[str, Any], message: str) -> None:
    task = ClassificationTask(config(**changes))
    with pytest.raises(ConfigError, match=message):
        task.check()


def test_more_clients_than_writers_are_refused(data_dir: Path) -> None:
    femnist = {"name": "femnist", "partition": {"kind": "natural"}}
    cfg = config(num_clients=101, dataset=femnist, data_dir=str(data_dir))
    with pytest.raises(ConfigError, match=r"num_clients=101 is more than the 100 natural clients"):
        ClassificationTask(cfg).check()
    cfg["num_clients"] = 100
    cfg["dataset"]["max_samples"] = 50
    task = ClassificationTask(cfg)
    assert max(task.train_size(cid) + task.test_size(cid) for cid in range(100)) == 50


def test_clients_have_numbers_below_num_clients() -> None:
    task = ClassificationTask(config())
    for cid in (-1, 10):
        with pytest.raises(ConfigError, match=f"no client {cid}: num_clients=10"):
            task.train_size(cid)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet_trains_on_cifar10(data_dir: Path, norm: str) -> None:
    cfg = config(
        num_clients=1000,
        dataset={"name": "cifar10", "partition": DIRICHLET | {"min_samples": 20}, "augment": "crop_flip"},
        model={"name": "resnet", "depth": 20, "norm": norm},
        data_dir=str(data_dir),
    )
    task = ClassificationTask(cfg)
    assert same(trained(task, 7), trained(task, 7))
    assert all(task.train_size(cid) >= 16 and task.test_size(cid) >= 4 for cid in range(1000))


def test_dropout_is_seeded(data_dir: Path) -> None:
    cfg = config(
        dataset={"name": "femnist", "partition": {"kind": "natural"}},
        model={"name": "cnn"},
        data_dir=str(data_dir),
    )
    task = ClassificationTask(cfg)
    first = trained(task, 0)
    torch.manual_seed(3)
    assert same(first, trained(task, 0))
