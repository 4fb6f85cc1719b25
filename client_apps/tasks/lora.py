"""LoRA: clients fine-tune a causal language model by low-rank adapters, and exchange these or the merged weights."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from client_apps.config import at_least_zero, boolean, choice, fraction, integer, positive, read
from client_apps.data import copying
from client_apps.data.copying import CopyingConfig, Sequences
from client_apps.errors import ConfigError
from client_apps.models import transformer
from client_apps.tasks.base import Evaluation, SplitName, quotient
from client_apps.tasks.dealt import DealtTask, Split
from client_apps.training import SGD, TrainResult, isolated_rng, seed_of, step_weight

log = logging.getLogger(__name__)

# Sets the random stream of personal training apart; not 0, which a seed cannot be told from.
_PERSONAL = 1
# The same for what belongs to no client: no client has so high a number.
_ADAPTERS, _PRETRAINING = (1 << 32) + 1, (1 << 32) + 2
_ADAPTER = "default"  # peft's own name of a model's first adapter
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class PretrainingConfig:
    """How the small model learns plain copying before clients start: `task.pretraining`.

    Parameters
    ----------
    steps, batch_size : int
        Steps of AdamW, each on new sequences, so many at once.
    lr : float
        Highest learning rate, reached after `warmup` steps; from there it falls in a line to 0.
    warmup : int
        Steps.
    min_accuracy : float
        The share of letters, in [0, 1], that it has to copy in the end.
    """

    steps: int = 200
    batch_size: int = 64
    lr: float = 3e-3
    warmup: int = 50
    min_accuracy: float = 0.99

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size", "warmup"):
            integer(f"task.pretraining.{key}", getattr(self, key), 1)
        positive("task.pretraining.lr", self.lr)
        fraction("task.pretraining.min_accuracy", self.min_accuracy)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.lr * min((step + 1) / self.warmup, 1.0) * (1 - step / self.steps)


@dataclass(frozen=True)
class AdapterConfig:
    """The adapters, what is exchanged, and what they adapt: `task`.

    Parameters
    ----------
    name : {"auto", "lora"}
        The task's.
    exchange : {"merged", "adapters"}
        What clients and server exchange: the adapted matrices with the adapters merged in, or the adapters.
    rank : int
        r of the adapters.
    alpha : float
        The update of a matrix is (alpha / r) B A.
    dropout : float
        Of what the adapters read, in [0, 1).
    target_modules : sequence of str
        Names of the linear layers that are adapted, or what follows a dot in their names, such as v_proj for those of
        all Transformer layers, or layers.1.self_attn.v_proj for that of one.
    train_a : bool
        Whether A is trained; if not, it stays what it was drawn as, the same for all, as in FFA-LoRA (Sun et al. 2024,
        arXiv 2403.12313), and is not exchanged.
    optimizer : {"adamw", "sgd"}
        Of local training, with the options of `client`; momentum is for sgd only.
    pretrained : str or None
        A causal language model, as a folder or by its name on the Hugging Face hub; None is the small one of `model`,
        pre-trained here.
    cache_dir : str or None
        Folder to keep the pre-trained small model in; None is fedconcord in the user's cache.
    pretraining : Mapping
        See `PretrainingConfig`.
    """

    name: str = "lora"
    exchange: str = "merged"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: Sequence[str] = ("v_proj", "o_proj")
    train_a: bool = True
    optimizer: str = "adamw"
    pretrained: str | None = None
    cache_dir: str | None = None
    pretraining: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("task.exchange", self.exchange, ("merged", "adapters"))
        integer("task.rank", self.rank, 1)
        positive("task.alpha", self.alpha)
        at_least_zero("task.dropout", self.dropout, below=1)
        names = self.target_modules
        if isinstance(names, str) or not isinstance(names, Sequence) or not names:
            raise ConfigError(f"task.target_modules must be a list of names of linear layers, not {names!r}.")
        boolean("task.train_a", self.train_a)
        choice("task.optimizer", self.optimizer, ("adamw", "sgd"))
        for key in ("pretrained", "cache_dir"):
            if not isinstance(getattr(self, key), str | None) or getattr(self, key) == "":
                raise ConfigError(f"task.{key} must be a path or null, not {getattr(self, key)!r}.")
        read(PretrainingConfig, self.pretraining, "task.pretraining")


class LoraTask(DealtTask[Sequences]):
    """Clients with token sequences, a language model, and how each client adapts it and tests what came of it.

    What `new_model` makes holds only what is exchanged; all else of the language model is the same for all and stays
    where it is. A client begins with new adapters each time: B = 0, and A drawn from the seed alone, the same for all
    clients and rounds; merged weights it has received are the frozen matrices they are added to, adapters it has
    received are those it begins with.

    Constructing checks the configuration; the model is made, pre-trained or read when it is needed.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        The composed configuration. Read are `seed`, `num_clients`, `dataset` (`CopyingConfig`), `task`
        (`AdapterConfig`), `model` (`client_apps.models.transformer.gpt`; unused with `task.pretrained`), `client`
        (`ClientConfig`) and `evaluation.batch_size` (1024).

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range.
    """

    metric = "accuracy"
    sums: Mapping[str, tuple[int, ...]] = MappingProxyType({"correct": ()})
    vectorized = False

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__(cfg)
        self.dataset = read(CopyingConfig, cfg["dataset"], "dataset")
        self.options = read(AdapterConfig, cfg.get("task", {}), "task")
        self.pretraining = read(PretrainingConfig, self.options.pretraining, "task.pretraining")
        self.eval_batch_size: int = (cfg.get("evaluation") or {}).get("batch_size", 1024)
        integer("evaluation.batch_size", self.eval_batch_size, 1)
        if self.client.vectorize is True:
            raise ConfigError("client.vectorize=true is not for task=lora; use client.vectorize=auto.")
        if self.client.momentum and self.options.optimizer == "adamw":
            raise ConfigError(
                f"client.momentum={self.client.momentum} is not for task.optimizer=adamw; set client.momentum=0 or "
                "task.optimizer=sgd."
            )
        if self.options.pretrained is None:
            self._untrained()  # refuses what cannot be made

    def check(self) -> None:
        """Deal the data, look for the device, and read the language model or pre-train it.

        Raises
        ------
        ConfigError
            There is no such device or model, it has no such modules, or pre-training did not succeed.
        """
        _ = self._splits, self.device, self._adapted

    def new_model(self) -> nn.Module:
        """Make what is exchanged at first on the CPU, bit for bit the same for the same seed.

        Returns
        -------
        nn.Module
            Its state_dict holds float32 tensors: of each adapted matrix the weights, (out, in), under its own name, or
            of its adapters A, (r, in), and B, (out, r), under peft's names.
        """
        return _nested(self._adapted.initial)

    def train(self, model: nn.Module, cid: int, server_round: int, proximal_mu: float = 0.0) -> TrainResult:
        """Adapt the language model to a client's training split, and put what is to be sent into `model`.

        The loss of a sequence is the mean cross-entropy of its scored tokens. Everything random is drawn from
        (seed, cid, server_round), so on a CPU with one thread the result is the same bit for bit wherever and in
        whatever order clients run.

        Parameters
        ----------
        model : nn.Module
            Changed in place, stays where it is.
        cid : int
            Client, from 0.
        server_round : int
            Round, from 1; the learning rate is lr * lr_decay^(server_round - 1).
        proximal_mu : float
            FedProx's μ: (μ/2)‖w − w_t‖² is added to the loss, with w what is exchanged: merged weights or adapters.

        Returns
        -------
        TrainResult
            Its `step_weight` is that of SGD, if that is used, else `local_steps`.
        """
        seed = seed_of(self.seed, cid, server_round)
        center = list(model.state_dict().values())
        return self._train(model, center, cid, seed, self.client.local_epochs, self._sgd(server_round, proximal_mu))

    def train_personal(self, model: nn.Module, center: Sequence[Tensor], cid: int, server_round: int) -> TrainResult:
        """Train a client's personal model in place: Ditto, as `ClassificationTask.train_personal`.

        Parameters
        ----------
        model : nn.Module
            v, that is what would be exchanged of it.
        center : sequence of Tensor
            w, in state_dict order; not changed.
        cid : int
            Client, from 0.
        server_round : int
            Round, from 1.
        """
        sgd, epochs = self._ditto(server_round)
        return self._train(model, center, cid, seed_of(self.seed, cid, server_round, _PERSONAL), epochs, sgd)

    def evaluate(self, model: nn.Module, cids: Sequence[int], split: SplitName = "test") -> Evaluation:
        """Evaluate the language model with what is exchanged on the test or training splits of some clients.

        Parameters
        ----------
        model : nn.Module
            Not changed.
        cids : Sequence[int]
            Clients, from 0.
        split : {"test", "train"}
            Which of each client's splits.

        Returns
        -------
        Evaluation
            Examples are sequences. Its sums are `correct`, (n,) in float64: the sum over sequences of the share of
            their scored tokens that are the likeliest ones, each token given those before it.
        """
        adapted = self._adapted
        adapted.load(list(model.state_dict().values()))
        adapted.network.eval()
        sizes = np.zeros(len(cids), np.int64)
        loss_sum, correct = np.zeros(len(cids)), np.zeros(len(cids))
        with torch.inference_mode():
            for row, cid in enumerate(cids):
                sequences: Sequences = getattr(self._split(cid), split)
                sizes[row] = len(sequences)
                tokens = self._tokens(sequences)
                for start in range(0, len(sequences), self.eval_batch_size):  # nothing where there are none
                    batch = tokens[start : start + self.eval_batch_size]
                    losses, hits = _judge(adapted.network, batch, sequences.scored)
                    loss_sum[row] += losses.mean(1).double().sum().item()
                    correct[row] += hits.sum().item() / sequences.scored
        return Evaluation(sizes, loss_sum, {"correct": correct})

    def scores(self, found: Evaluation) -> NDArray[np.float64]:
        """Return the accuracy of each client: the share of scored tokens that are right."""
        return quotient(found.sums["correct"], found.num_examples)

    def summary(self, found: Evaluation) -> dict[str, float]:
        """Return nothing: the accuracy is all there is."""
        return {}

    def details(self, found: Evaluation) -> dict[str, NDArray[np.float64]]:
        """Return nothing: a client's accuracy is all there is."""
        return {}

    @cached_property
    def _splits(self) -> list[Split[Sequences]]:
        shuffled = self.attackers if self.client.attack == "shuffled_labels" else frozenset()
        return [
            Split(*copying.split(self.dataset, self.seed, cid, shuffled=cid in shuffled))
            for cid in range(self.num_clients)
        ]

    @cached_property
    def _adapted(self) -> AdaptedModel:
        """The language model with adapters, made once and overwritten by each client."""
        name = self.options.pretrained
        if name is None:
            language_model = self._pretrained()
        else:
            with isolated_rng(self.seed, _CPU):
                language_model = transformer.pretrained(name, tokens=self.dataset.tokens, context=self.dataset.context)
        return AdaptedModel(language_model, self.options, seed_of(self.seed, _ADAPTERS), self.device)

    def _untrained(self) -> nn.Module:
        with isolated_rng(seed_of(self.seed, _PRETRAINING), _CPU):
            return transformer.gpt(self._model_config, tokens=self.dataset.tokens, context=self.dataset.context)

    def _pretrained(self) -> nn.Module:
        """Return the small model, having learnt plain copying; on the CPU, where its bits depend on nobody's GPU."""
        model = self._untrained()
        decides = {
            "version": 1,  # of the code here and of the architecture
            "model": dict(self._model_config),
            "dataset": {"vocabulary": self.dataset.vocabulary, "length": self.dataset.length},
            "pretraining": asdict(self.pretraining),
            "seed": self.seed,
        }
        transformer.kept(self._cache_dir, "copying", decides, model, lambda: self._pretrain(model))
        return model

    @property
    def _cache_dir(self) -> Path:
        if self.options.cache_dir is not None:
            return Path(self.options.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedconcord"

    def _pretrain(self, model: nn.Module) -> None:
        options, generator = self.pretraining, np.random.default_rng([self.seed, _PRETRAINING])
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        log.info("the small model is pre-trained on plain copying, %d steps, once for this seed", options.steps)
        with _one_thread():
            model.train()
            for step in range(options.steps):
                for group in optimizer.param_groups:
                    group["lr"] = options.rate(step)
                sequences = copying.plain(self.dataset, generator, options.batch_size)
                losses, hits = _judge(model, torch.from_numpy(sequences.tokens), sequences.scored)
                optimizer.zero_grad()
                torch.autograd.backward(losses.mean())
                optimizer.step()
                if (step + 1) % 50 == 0:
                    log.info(
                        "step %d: loss %.4f, accuracy %.3f", step + 1, losses.mean().item(), hits.double().mean().item()
                    )
            model.eval()
            sequences = copying.plain(self.dataset, generator, 256)
            with torch.inference_mode():
                _, hits = _judge(model, torch.from_numpy(sequences.tokens), sequences.scored)
        accuracy = hits.double().mean().item()
        if accuracy < options.min_accuracy:
            raise ConfigError(
                f"The small model copies {accuracy:.1%} of the letters after task.pretraining.steps={options.steps}, "
                f"and {options.min_accuracy:.1%} are asked for; raise the steps, or change model or dataset."
            )

    def _train(
        self, model: nn.Module, center: Sequence[Tensor], cid: int, seed: int, epochs: int, sgd: SGD
    ) -> TrainResult:
        sequences = self._split(cid).train
        adapted, tokens = self._adapted, self._tokens(sequences)
        adapted.load(list(model.state_dict().values()))
        adapted.network.train()
        center = [tensor.detach().to(self.device) for tensor in center]
        optimizer = self._optimizer(adapted.trained, sgd)
        generator = torch.Generator().manual_seed(seed)
        loss_sum, steps = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with isolated_rng(seed, self.device):
            for _ in range(epochs):
                order = torch.randperm(len(sequences), generator=generator).to(self.device)
                for batch in torch.split(order, self.client.batch_size):
                    losses, _ = _judge(adapted.network, tokens[batch], sequences.scored)
                    loss = losses.mean()
                    loss_sum += loss.detach() * len(batch)
                    if sgd.proximal_mu:
                        pairs = zip(adapted.exchanged().values(), center, strict=True)
                        loss = loss + sgd.proximal_mu / 2 * sum((w - c).square().sum() for w, c in pairs)
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                    optimizer.step()
                    steps += 1
        with torch.no_grad():
            for target, tensor in zip(model.state_dict().values(), adapted.exchanged().values(), strict=True):
                target.copy_(tensor)
        weight = step_weight(steps, sgd) if self.options.optimizer == "sgd" else float(steps)
        return TrainResult(len(sequences), loss_sum.item() / (len(sequences) * epochs), steps, weight)

    def _optimizer(self, parameters: Sequence[Tensor], sgd: SGD) -> torch.optim.Optimizer:
        if self.options.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
        return torch.optim.AdamW(parameters, lr=sgd.lr, weight_decay=sgd.weight_decay)

    def _tokens(self, sequences: Sequences) -> Tensor:
        return torch.from_numpy(sequences.tokens).to(self.device)


class AdaptedModel:
    """A language model with LoRA adapters of peft, which what is exchanged can be put into and read from.

    Parameters
    ----------
    language_model : nn.Module
        A causal language model of transformers; changed in place.
    options : AdapterConfig
        Which modules get adapters, which adapters, and what is exchanged.
    seed : int
        Of A.
    device : torch.device
        Where to.

    Attributes
    ----------
    network : nn.Module
        The language model with its adapters.
    trained : list of Parameter
        Of the adapters, those that are trained.
    initial : dict of str to Tensor
        What is exchanged before any training, by name, on the CPU.

    Raises
    ------
    ConfigError
        There are no such modules, or one cannot be adapted.
    """

    def __init__(self, language_model: nn.Module, options: AdapterConfig, seed: int, device: torch.device) -> None:
        _check_targets(language_model, options.target_modules)
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,  # type: ignore[arg-type]  # any number
            lora_dropout=options.dropout,
            target_modules=list(options.target_modules),
        )
        with isolated_rng(seed, _CPU), warnings.catch_warnings():
            # It finds out itself which modules are Conv1D, and says so.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
            # A property of transformers' own models, which peft looks for by touching every attribute.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            self.network: nn.Module = get_peft_model(language_model, config).to(device)
        self._layers: dict[str, Any] = {n: m for n, m in self.network.named_modules() if isinstance(m, LoraLayer)}
        self._merged, self._train_a = options.exchange == "merged", options.train_a
        self.trained: list[nn.Parameter] = []
        for layer in self._layers.values():
            a, b = _adapters(layer)
            a.requires_grad_(options.train_a)
            self.trained += [a, b] if options.train_a else [b]
        self._fresh = [(a.detach().clone(), b.detach().clone()) for a, b in map(_adapters, self._layers.values())]
        with torch.no_grad():
            self.initial = {name: tensor.cpu().clone() for name, tensor in self.exchanged().items()}

    def exchanged(self) -> dict[str, Tensor]:
        """Return what is exchanged by name; gradients flow through it to the adapters.

        Merged weights are W + (alpha/r) B A, (out, in), whichever way round the language model keeps W.
        """
        found = {}
        for name, layer in self._layers.items():
            if self._merged:
                merged = layer.get_base_layer().weight + layer.get_delta_weight(_ADAPTER)
                found[f"{name.removeprefix('base_model.model.')}.weight"] = merged.T if _turned(layer) else merged
            else:
                a, b = _adapters(layer)
                if self._train_a:
                    found[f"{name}.lora_A.weight"] = a
                found[f"{name}.lora_B.weight"] = b
        return found

    @torch.no_grad()
    def load(self, state: Sequence[Tensor]) -> None:
        """Overwrite the adapted matrices or the adapters, in the order of `initial`; adapters not in it are as new."""
        for layer, fresh in zip(self._layers.values(), self._fresh, strict=True):
            for adapter, initial in zip(_adapters(layer), fresh, strict=True):
                adapter.copy_(initial)
        if self._merged:
            for layer, tensor in zip(self._layers.values(), state, strict=True):
                layer.get_base_layer().weight.copy_(tensor.T if _turned(layer) else tensor)
        else:
            for adapter, tensor in zip(self.trained, state, strict=True):
                adapter.copy_(tensor)


def _adapters(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A, (r, in), and B, (out, r), of one of peft's layers."""
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight


def _turned(layer: Any) -> bool:
    """Tell whether the layer below keeps its weights as (in, out), as GPT-2's Conv1D does."""
    return isinstance(layer.get_base_layer(), Conv1D)


def _check_targets(language_model: nn.Module, names: Sequence[str]) -> None:
    """Raise ConfigError unless each name is that of linear layers, as peft finds them, with weights of their own."""
    owners: dict[int, list[str]] = {}
    for name, parameter in language_model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    linear = {name: m for name, m in language_model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    for target in names:
        found = {name: m for name, m in linear.items() if name == target or name.endswith(f".{target}")}
        if not found:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"task.target_modules: the model has no linear layer {target!r}; it has {', '.join(known)}."
            )
        for name, module in found.items():
            if len(shared := owners[id(module.weight)]) > 1:
                raise ConfigError(
                    f"task.target_modules: {name} shares its weights with others ({' and '.join(shared)}), so it "
                    "cannot be adapted alone; name other layers."
                )


def _nested(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module with these parameters, in this order, whose submodules are what the dots of their names say."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        place = root
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(leaf, nn.Parameter(tensor.clone()))
    return root


def _judge(network: nn.Module, tokens: Tensor, scored: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropies of the scored tokens and whether they are the likeliest ones, both (b, scored)."""
    said = tokens[:, -scored:]
    logits = network(input_ids=tokens[:, :-1], use_cache=False).logits[:, -scored:].float()
    losses = F.cross_entropy(logits.transpose(1, 2), said, reduction="none")
    return losses, logits.argmax(2) == said


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, so that how many there are does not decide the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
