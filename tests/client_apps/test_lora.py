"""The LoRA task: what is exchanged, training from it, the kept small model, GPT-2, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from peft import get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

from client_apps.app import TaskClient
from client_apps.arrays import get_arrays, set_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import build
from client_apps.tasks.lora import LoraTask
from experiments.config import compose
from experiments.run import run
from strategies import LayerMap

ATTENTION = [f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "vo"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where small models are kept that tests share."""
    return tmp_path_factory.mktemp("cache")


def config(cache: Path, **changes: Any) -> dict[str, Any]:
    """A small run, with `section__key=value` changes."""
    cfg: dict[str, Any] = {
        "seed": 0,
        "num_clients": 3,
        "dataset": {
            "name": "copying",
            "vocabulary": 8,
            "length": 4,
            "train_samples": 12,
            "test_samples": 20,
            "shifted": 4,
        },
        "model": {"name": "gpt", "layers": 2, "width": 16, "heads": 2},
        "task": {
            "name": "lora",
            "rank": 3,
            "cache_dir": str(cache),
            "pretraining": {"steps": 20, "batch_size": 16, "warmup": 5, "min_accuracy": 0.0},
        },
        "client": {"lr": 0.01, "local_epochs": 2, "batch_size": 5, "device": "cpu"},
    }
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        place = cfg
        for part in section.split("__") if section else ():
            place = place[part]
        place[key] = value
    return cfg


def trained(task: LoraTask, cid: int = 0, server_round: int = 1, mu: float = 0.0) -> list[np.ndarray]:
    model = task.new_model()
    task.train(model, cid, server_round, mu)
    return get_arrays(model)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(one, other, strict=True))))


# What is exchanged


def test_merged_weights_are_the_adapted_matrices_alone(cache: Path) -> None:
    task = LoraTask(config(cache))
    state = task.new_model().state_dict()
    assert list(state) == ATTENTION
    assert all(tensor.shape == (16, 16) and tensor.dtype == torch.float32 for tensor in state.values())
    layers = LayerMap.from_module(task.new_model())
    assert (layers.kinds, len(layers.layers)) == (("trainable",) * 4, 4)


def test_adapters_are_those_of_peft_under_its_names(cache: Path) -> None:
    task = LoraTask(config(cache, task__exchange="adapters"))
    model = task.new_model()
    task.train(model, 0, 1)
    theirs = get_peft_model_state_dict(task._adapted.network)
    assert list(model.state_dict()) == list(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    shapes = {tuple(tensor.shape) for name, tensor in theirs.items() if "lora_A" in name}
    assert shapes == {(3, 16)}
    assert set(LayerMap.from_module(model).kinds) == {"trainable"}


def test_without_training_a_only_b_is_exchanged_and_a_stays(cache: Path) -> None:
    task = LoraTask(config(cache, task__exchange="adapters", task__train_a=False))
    names = list(task.new_model().state_dict())
    assert len(names) == 4
    assert all(name.endswith("lora_B.weight") for name in names)
    before = [tensor.clone() for name, tensor in task._adapted.network.state_dict().items() if "lora_A" in name]
    assert any(np.any(array) for array in trained(task))
    after = [tensor for name, tensor in task._adapted.network.state_dict().items() if "lora_A" in name]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_merged_weights_are_w_plus_alpha_over_r_b_a(cache: Path, optimizer: str) -> None:
    task = LoraTask(config(cache, task__alpha=7.0, task__optimizer=optimizer, client__lr=0.05))
    start, end = get_arrays(task.new_model()), trained(task)
    adapters = {name: t.double().numpy() for name, t in get_peft_model_state_dict(task._adapted.network).items()}
    for name, before, after in zip(ATTENTION, start, end, strict=True):
        a, b = (adapters[f"base_model.model.{name.removesuffix('weight')}lora_{ab}.weight"] for ab in "AB")
        expected = before.astype(np.float64) + 7 / 3 * b @ a
        assert np.abs(expected - before).max() > 1e-4
        assert np.allclose(after, expected, rtol=0, atol=1e-6)
        assert np.linalg.matrix_rank(after.astype(np.float64) - before, tol=1e-4) <= 3


def test_without_training_a_all_updates_lie_in_the_row_space_of_the_first_a(cache: Path) -> None:
    task = LoraTask(config(cache, task__train_a=False))
    start = get_arrays(task.new_model())
    updates = [[a - b for a, b in zip(trained(task, cid, cid + 1), start, strict=True)] for cid in range(3)]
    for matrices in zip(*updates, strict=True):
        assert np.linalg.matrix_rank(np.concatenate(matrices), tol=1e-4) == 3


@pytest.mark.parametrize("exchange", ["merged", "adapters"])
def test_what_is_received_is_what_is_evaluated_and_begun_with(cache: Path, exchange: str) -> None:
    task = LoraTask(config(cache, task__exchange=exchange))
    model = task.new_model()
    task.train(model, 0, 1)
    found = task.evaluate(model, [0])
    task.train(task.new_model(), 1, 1)  # another client in between, in the same network
    again = task.evaluate(model, [0])
    assert found.loss_sum[0] == again.loss_sum[0]
    assert found.loss_sum[0] != task.evaluate(task.new_model(), [0]).loss_sum[0]
    before = get_arrays(model)
    tiny = LoraTask(config(cache, task__exchange=exchange, client__lr=1e-12))
    other = tiny.new_model()
    set_arrays(other, before)
    result = tiny.train(other, 0, 2)
    assert distance(before, get_arrays(other)) < 1e-6
    assert result.train_loss == pytest.approx(task.evaluate(model, [0], "train").loss_sum[0] / 12, rel=1e-4)


# Training


@pytest.mark.parametrize("exchange", ["merged", "adapters"])
def test_training_is_bitwise_the_same_in_any_order(cache: Path, exchange: str) -> None:
    state = torch.get_rng_state()
    cfg = config(cache, task__exchange=exchange, task__dropout=0.2)
    forwards = [trained(task, cid) for task in [LoraTask(cfg)] for cid in range(3)]
    torch.manual_seed(9)
    backwards = [trained(task, cid) for task in [LoraTask(cfg)] for cid in (2, 1, 0)][::-1]
    torch.set_rng_state(state)
    assert all(same(one, other) for one, other in zip(forwards, backwards, strict=True))
    assert not same(forwards[0], forwards[1])
    assert not same(forwards[0], trained(LoraTask(cfg), 0, server_round=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_client_reports_its_steps_and_its_mean_loss(cache: Path) -> None:
    task = LoraTask(config(cache, client__local_epochs=2, client__lr=1e-12))
    model = task.new_model()
    before = task.evaluate(model, [0], "train").loss_sum[0] / 12
    result = task.train(model, 0, 1)
    assert (result.num_examples, result.local_steps, result.step_weight) == (12, 6, 6)  # batches of 5, 5 and 2
    assert result.train_loss == pytest.approx(before, rel=1e-5)  # every sequence counts once an epoch


def test_step_weight_of_momentum_is_that_of_sgd(cache: Path) -> None:
    task = LoraTask(config(cache, task__optimizer="sgd", client__momentum=0.5, client__local_epochs=1))
    result = task.train(task.new_model(), 0, 1)
    assert result.local_steps == 3
    assert result.step_weight == pytest.approx(1 + 1.5 + 1.75)


@pytest.mark.parametrize("exchange", ["merged", "adapters"])
def test_a_proximal_term_pulls_to_what_was_received(cache: Path, exchange: str) -> None:
    task = LoraTask(config(cache, task__exchange=exchange, client__local_epochs=10))
    start = get_arrays(task.new_model())
    away = [distance(start, trained(task, mu=mu)) for mu in (0.0, 1.0, 100.0)]
    assert away[0] > 1.2 * away[1] > 1.2 * away[2]


def test_the_proximal_gradient_of_merged_weights_by_hand(cache: Path) -> None:
    """With s = alpha/r, that of (μ/2)‖s B A‖² is μ s² B A Aᵀ: 0 in the first step of all samples, not in the second."""

    def adapters(epochs: int, mu: float) -> dict[str, torch.Tensor]:
        options = {"task__optimizer": "sgd", "task__train_a": False, "client__lr": 0.1, "client__batch_size": 12}
        task = LoraTask(config(cache, client__local_epochs=epochs, **options))
        task.train(task.new_model(), 0, 1, mu)
        return {name: t.double() for name, t in get_peft_model_state_dict(task._adapted.network).items()}

    once, twice, pulled = adapters(1, 0.5), adapters(2, 0.0), adapters(2, 0.5)
    for name in (name for name in once if "lora_B" in name):
        a = once[name.replace("lora_B", "lora_A")]
        pull = 0.1 * 0.5 * (16 / 3) ** 2 * once[name] @ a @ a.T
        assert float(pull.abs().max()) > 1e-4
        assert torch.allclose(pulled[name], twice[name] - pull, rtol=0, atol=1e-6)


def test_ditto_pulls_a_personal_model_to_the_global_one(cache: Path) -> None:
    away = []
    for strength in (0.0, 100.0):
        task = LoraTask(config(cache, client__ditto_lambda=strength, client__local_epochs=10))
        model, center = task.new_model(), list(task.new_model().state_dict().values())
        result = task.train_personal(model, center, 0, 1)
        assert result.local_steps == 30
        away.append(distance(get_arrays(model), [tensor.numpy() for tensor in center]))
    assert away[0] > 1.2 * away[1] > 0


def test_shuffled_labels_change_an_attackers_training_split_alone(cache: Path) -> None:
    honest = LoraTask(config(cache))
    attacked = LoraTask(config(cache, client__attack="shuffled_labels", client__attackers=[1]))
    for cid in range(3):
        one, other = honest._split(cid), attacked._split(cid)
        assert np.array_equal(one.test.tokens, other.test.tokens)
        assert np.array_equal(one.train.tokens, other.train.tokens) == (cid != 1)
    noise = LoraTask(config(cache, client__attack="scaled_noise", client__attackers=1))
    assert np.array_equal(noise._split(2).train.tokens, honest._split(2).train.tokens)


def test_evaluation_counts_sequences(cache: Path) -> None:
    task = LoraTask(config(cache))
    model = task.new_model()
    found = task.evaluate(model, [2, 0])
    assert found.num_examples.tolist() == [20, 20]
    scores = task.scores(found)
    assert ((scores >= 0) & (scores <= 1)).all()
    tokens = torch.from_numpy(task._split(2).test.tokens)
    with torch.inference_mode():
        logits = task._adapted.network(input_ids=tokens).logits[:, 4:-1].double()
    right = (logits.argmax(2) == tokens[:, 5:]).double()
    losses = -logits.log_softmax(2).gather(2, tokens[:, 5:, None])
    assert found.sums["correct"][0] == pytest.approx(float(right.mean(1).sum()))
    assert found.loss_sum[0] == pytest.approx(float(losses.mean((1, 2)).sum()), rel=1e-5)
    small = LoraTask({**config(cache), "evaluation": {"batch_size": 7}})
    again = small.evaluate(model, [2, 0])
    assert again.sums["correct"].tolist() == found.sums["correct"].tolist()
    empty = LoraTask(config(cache, dataset__test_samples=0)).evaluate(model, [0])
    assert empty.num_examples.tolist() == [0]


def test_clients_are_trained_one_by_one(cache: Path) -> None:
    task = LoraTask(config(cache))
    with pytest.raises(NotImplementedError):
        task.train_many([], [], 1, list)
    with pytest.raises(NotImplementedError):
        task.train_personal_many([], [], [], 1, list)


def test_a_flower_client_answers_with_merged_weights(cache: Path) -> None:
    task = build(config(cache))
    assert isinstance(task, LoraTask)
    start = ndarrays_to_parameters(get_arrays(task.new_model()))
    answer = TaskClient(task, 1).fit(FitIns(start, {"server_round": 1, "initial_loss": True}))
    assert same(parameters_to_ndarrays(answer.parameters), trained(task, 1))
    assert answer.num_examples == 12
    assert answer.metrics["initial_loss"] > 0


# The small model


def test_the_small_model_learns_to_copy(tmp_path: Path) -> None:
    cfg = config(tmp_path, dataset__variant="plain", dataset__vocabulary=16, dataset__length=6)
    cfg["model"] |= {"width": 32}
    cfg["task"]["pretraining"] = {"steps": 150, "batch_size": 32, "warmup": 30, "lr": 0.01}
    task = LoraTask(cfg)
    task.check()  # refuses one that copies less than 99 %
    assert task.scores(task.evaluate(task.new_model(), [0, 1, 2])).min() > 0.97
    # Its clients learn a shift from there.
    data, client = cfg["dataset"] | {"variant": "shift", "train_samples": 40}, cfg["client"] | {"local_epochs": 20}
    shifted = LoraTask(cfg | {"dataset": data, "client": client})
    model = shifted.new_model()
    before = shifted.scores(shifted.evaluate(model, [0]))[0]
    shifted.train(model, 0, 1)
    assert shifted.scores(shifted.evaluate(model, [0]))[0] > before + 0.1


def test_the_small_model_is_kept_and_a_damaged_file_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path / "new" / "folder")
    first = get_arrays(LoraTask(cfg).new_model())
    (file,) = (tmp_path / "new" / "folder").iterdir()
    whole = file.read_bytes()
    with caplog.at_level(logging.INFO):
        assert same(first, get_arrays(LoraTask(cfg).new_model()))
    assert f"read from {file}" in caplog.text
    assert "pre-trained" not in caplog.text
    flipped = bytearray(whole)
    flipped[-9] ^= 64
    for damaged in (b"", whole[:100], whole[:-1], bytes(flipped), b"\xff" * len(whole)):
        file.write_bytes(damaged)
        caplog.clear()
        assert same(first, get_arrays(LoraTask(cfg).new_model()))
        assert "is damaged and made anew" in caplog.text
        assert file.read_bytes() == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # and no drafts


def test_whatever_decides_the_small_model_has_a_file_of_its_own(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"model__width": 32},
        {"dataset__vocabulary": 9},
        {"dataset__length": 5},
        {"task__pretraining": {"steps": 3, "min_accuracy": 0.0}},
    ]
    for number, change in enumerate(changes, 1):
        LoraTask(config(tmp_path, **change)).new_model()
        assert len(list(tmp_path.iterdir())) == number
    # What it does not depend on shares the file.
    LoraTask(config(tmp_path, dataset__noise=0.5, task__rank=2, client__lr=1.0, num_clients=2)).new_model()
    assert len(list(tmp_path.iterdir())) == number


def test_the_cache_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    LoraTask(config(tmp_path, task__cache_dir=None)).new_model()
    assert len(list((tmp_path / "fedconcord").iterdir())) == 1


# A pre-trained model


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2, whose Conv1D layers keep weights as (in, out)."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    ).save_pretrained(folder)
    return folder


def of_gpt2(folder: Path, **changes: Any) -> LoraTask:
    return LoraTask(config(folder, task__pretrained=str(folder), task__target_modules=["c_attn"], **changes))


def test_weights_kept_the_other_way_round_are_exchanged_turned(gpt2: Path) -> None:
    task = of_gpt2(gpt2, client__lr=0.05)
    original = GPT2LMHeadModel.from_pretrained(gpt2).transformer.h[0].attn.c_attn.weight.detach()
    start = get_arrays(task.new_model())
    assert list(task.new_model().state_dict()) == ["transformer.h.0.attn.c_attn.weight"]
    assert original.shape == (8, 24)
    assert np.array_equal(start[0], original.T.numpy())
    (end,) = trained(task)
    adapters = get_peft_model_state_dict(task._adapted.network)
    a, b = (next(t for name, t in adapters.items() if f"lora_{ab}" in name).double().numpy() for ab in "AB")
    assert (a.shape, b.shape) == ((3, 8), (24, 3))
    assert np.allclose(end, start[0] + 16 / 3 * b @ a, rtol=0, atol=1e-6)
    # The row space of the update, its right one, is A's.
    outside = (end - start[0]).astype(np.float64) @ (np.eye(8) - np.linalg.pinv(a) @ a)
    assert np.abs(outside).max() < 1e-6


def test_merged_weights_say_what_the_adapted_model_does(gpt2: Path) -> None:
    task = of_gpt2(gpt2, client__lr=0.05)
    model = task.new_model()
    task.train(model, 0, 1)
    tokens = torch.from_numpy(task._split(0).test.tokens)
    network = task._adapted.network.eval()
    with torch.no_grad():
        with_adapters = network(input_ids=tokens).logits
        task._adapted.load(list(model.state_dict().values()))
        merged = network(input_ids=tokens).logits
    assert torch.allclose(with_adapters, merged, atol=1e-5)


def test_a_model_that_lacks_weights_is_refused(gpt2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(gpt2 / "model.safetensors")
    del tensors["transformer.ln_f.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"lacks 1 of its model's tensors, such as transformer\.ln_f\.weight"):
        of_gpt2(tmp_path).check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset__vocabulary": 20}, "knows 20 tokens and the data set has 21"),
        ({"dataset__length": 16}, "reads at most 32 tokens and sequences have 33"),
        ({"task__target_modules": ["c_attn", "q_proj"]}, "no linear layer 'q_proj'; it has c_attn, c_fc, c_proj"),
        ({"task__target_modules": ["wte"]}, "no linear layer 'wte'"),
        ({"task__target_modules": ["lm_head"]}, "lm_head shares its weights"),
    ],
)
def test_a_pretrained_model_that_does_not_fit_is_refused(gpt2: Path, changes: dict[str, Any], words: str) -> None:
    cfg = config(gpt2, task__pretrained=str(gpt2), task__target_modules=["c_attn"])
    for path, value in changes.items():
        section, key = path.split("__")
        cfg[section][key] = value
    with pytest.raises(ConfigError, match=words) as error:
        LoraTask(cfg).check()
    assert "\n" not in str(error.value)


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task__exchange": "all"}, "one of merged, adapters"),
        ({"task__rank": 0}, "task.rank"),
        ({"task__alpha": 0}, "task.alpha"),
        ({"task__dropout": 1}, "task.dropout"),
        ({"task__target_modules": []}, "list of names"),
        ({"task__target_modules": "v_proj"}, "list of names"),
        ({"task__target_modules": ["c_attn"]}, "no linear layer 'c_attn'; it has down_proj, gate_proj"),
        ({"task__train_a": 1}, "task.train_a"),
        ({"task__optimizer": "lion"}, "one of adamw, sgd"),
        ({"task__pretrained": 3}, "task.pretrained must be a path"),
        ({"task__pretrained": "no/such/folder"}, "'no/such/folder' is no causal language model"),
        ({"task__pretraining": {"steps": 0}}, "task.pretraining.steps"),
        ({"task__pretraining": {"epochs": 1}}, "task.pretraining.epochs is not a known key"),
        ({"task__pretraining": {"steps": 1}}, r"raise the steps"),
        ({"task__depth": 1}, "task.depth is not a known key"),
        ({"model__name": "mlp"}, "set model=gpt"),
        ({"model": {}}, "model.name is missing"),
        ({"model__heads": 3}, "must be divisible"),
        ({"model__depth": 3}, "model.depth is not a known key"),
        ({"client__vectorize": True}, "client.vectorize=auto"),
        ({"client__momentum": 0.9}, "not for task.optimizer=adamw"),
        ({"dataset__partition": {}}, "dataset.partition is not a known key"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    cache: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=words) as error:
        LoraTask(config(cache, **changes)).check()
    assert "\n" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"set task\.cache_dir"):
        LoraTask(config(tmp_path / "file")).check()


# Whole runs

TINY = [
    "num_clients=3", "clients_per_round=3", "num_rounds=1", "dataset.vocabulary=8", "dataset.length=4",
    "dataset.train_samples=6", "dataset.test_samples=5", "model.width=16", "model.heads=2", "client.local_epochs=1",
    "task.pretraining={steps: 20, batch_size: 16, warmup: 5, lr: 0.003, min_accuracy: 0}", "client.device=cpu",
    "simulation=serial", "tracking.tensorboard=false", "tracking.progress=false",
]  # fmt: skip


def test_the_experiment_composes() -> None:
    cfg = compose(["experiment=clair_copy", "strategy=fedavg", "output_dir=out"])
    task = build(cfg)
    assert isinstance(task, LoraTask)
    assert (task.num_clients, task.attackers, cfg["evaluation"]["mode"]) == (10, frozenset({9}), "federated")


@pytest.mark.parametrize(
    ("strategy", "exchange"), [("fedavg", "merged"), ("fedavg", "adapters"), ("craft", "merged"), ("craft", "adapters")]
)
def test_a_run_of_one_round(tmp_path: Path, cache: Path, strategy: str, exchange: str) -> None:
    overrides = [f"strategy={strategy}", f"task.exchange={exchange}", f"task.cache_dir={cache}"]
    run(compose(["experiment=clair_copy", *TINY, *overrides, f"output_dir={tmp_path}"]))
    rounds = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (record,) = rounds
    assert (record["round"], record["clients_evaluated"]) == (1, 3)
    assert 0 <= record["accuracy"] <= 1
