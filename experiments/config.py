"""Composing a run's configuration with Hydra, from the command line or from a Flower run config, and checking it."""

from __future__ import annotations

import importlib
import inspect
import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from client_apps.errors import ConfigError
from client_apps.tasks import Task, build
from strategies import LayerMap, UpdateStrategy
from strategies.options import is_count, is_integer, is_real

from .engine import ENGINES
from .hparams import apply_point

logger = logging.getLogger(__name__)

_TOP = {
    "seed", "num_clients", "num_rounds", "clients_per_round", "data_dir", "output_dir", "target_accuracy",
    "strategy", "dataset", "model", "client", "evaluation", "simulation", "tracking",
}  # fmt: skip
# May be absent, as in configurations of before they were known.
_OPTIONAL = {"skip_finished", "benchmark_name", "task", "round_timeout", "min_available", "checkpoint", "resume"}
# What only composing needs.
_COMPOSING = {"hydra", "experiment", "benchmark", "hparams", "tuned", "tuning_rounds"}
# The keys of the groups that are read here; an empty set where the room that reads them checks them.
_GROUPS: dict[str, set[str]] = {
    "strategy": set(),
    "dataset": set(),
    "model": set(),
    "client": set(),
    "evaluation": {"mode", "every", "batch_size"},
    "simulation": {"engine", "num_cpus", "client_cpus", "client_gpus", "object_store_mb", "address"},
    "tracking": {"tensorboard", "progress", "udp_loss_delta", "udp_norm_delta", "examples"},
}
# What this suite, not the configuration, hands to a strategy.
_LEAST_STORE_MB = 75
_RESERVED = {
    "layers", "seed", "initial_parameters", "evaluate_fn", "evaluate_metrics_aggregation_fn", "partition_order",
    "fraction_fit", "fraction_evaluate", "min_fit_clients", "min_evaluate_clients", "min_available_clients",
    "on_fit_config_fn", "on_evaluate_config_fn", "fit_metrics_aggregation_fn", "inplace",
}  # fmt: skip


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the configuration from the packaged `conf`, as `python -m experiments.run` would.

    Raises
    ------
    ConfigError
        If an override names an unknown key, group or option; Hydra's message in one sentence.
    """
    try:
        GlobalHydra.instance().clear()
        with initialize_config_module("conf", version_base="1.3", job_name="fedconcord"):
            cfg = hydra_compose("config", overrides=list(overrides))
            return to_dict(cfg, overrides)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the overrides {list(overrides)} do not compose: {message_of(error)}") from error


def from_run_config(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Compose the configuration a Flower run asks for in its run config: `overrides="strategy=craft seed=1"`."""
    try:
        overrides = shlex.split(str(run_config.get("overrides", "")))
    except ValueError as error:
        raise ConfigError(f"overrides={run_config.get('overrides')!r} cannot be split into words: {error}.") from error
    return compose(overrides)


def to_dict(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resolve a composed configuration to plain Python values, without what only composing needs.

    The point that its hparams choose is applied first, except to the keys that the overrides set.
    """
    plain = OmegaConf.to_container(apply_point(cfg, overrides), resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in _COMPOSING}


def check(cfg: Mapping[str, Any]) -> Task:
    """Refuse what cannot run, before any client starts, and return the task, its data loaded.

    Raises
    ------
    ConfigError
        One sentence: what is wrong, where, and what to do.
    """
    missing = sorted(_TOP - set(cfg))
    if missing:
        raise ConfigError(f"the configuration lacks {missing[0]}; do not remove it.")
    _known("the configuration", cfg, _TOP | _OPTIONAL)
    for group, keys in _GROUPS.items():
        if not isinstance(cfg[group], Mapping) or (keys and keys - set(cfg[group])):
            raise ConfigError(f"{group}={cfg[group]!r} must be a group of keys, as {group}= chooses one.")
        if keys:
            _known(group, cfg[group], keys)
    _require("seed", cfg["seed"], "an integer from 0 to 2^63 - 1", is_integer(cfg["seed"]) and 0 <= cfg["seed"] < 2**63)
    for key in ("num_clients", "num_rounds", "clients_per_round"):
        _require(key, cfg[key], "an integer of at least 1", is_count(cfg[key]))
    _require("output_dir", cfg["output_dir"], "a path", isinstance(cfg["output_dir"], str))
    _require("data_dir", cfg["data_dir"], "a path, or null", isinstance(cfg["data_dir"], str | None))
    skip, benchmark = cfg.get("skip_finished", False), cfg.get("benchmark_name")
    _require("skip_finished", skip, "true or false", isinstance(skip, bool))
    _require("benchmark_name", benchmark, "a name, or null", isinstance(benchmark, str | None))
    target = cfg["target_accuracy"]
    share = target is None or (is_real(target) and 0 < target <= 1)
    timeout = cfg.get("round_timeout")
    positive = timeout is None or (is_real(timeout) and timeout > 0)
    _require("round_timeout", timeout, "a number of seconds above 0, or null", positive)
    least = cfg.get("min_available")
    within = least is None or (is_count(least) and least <= cfg["num_clients"])
    _require("min_available", least, f"an integer from 1 to num_clients={cfg['num_clients']}, or null", within)
    resume = cfg.get("resume")
    named = resume is None or (isinstance(resume, str) and bool(resume))
    _require("resume", resume, "auto, the folder of a run or of a checkpoint, or null", named)
    _check_checkpoint(cfg.get("checkpoint", {"every": None, "keep": 1}))
    _require("target_accuracy", target, "a share in (0, 1], not per cent, or null", share)
    if cfg["clients_per_round"] > cfg["num_clients"]:
        raise ConfigError(
            f"clients_per_round={cfg['clients_per_round']} exceeds num_clients={cfg['num_clients']}; lower the first "
            "or raise the second."
        )
    _check_groups(cfg)
    strategy = build_strategy(cfg)
    if is_integer(strategy.min_completed) and strategy.min_completed > cfg["clients_per_round"]:
        raise ConfigError(
            f"strategy.min_completed={strategy.min_completed} can never be reached with clients_per_round="
            f"{cfg['clients_per_round']}; lower the first or raise the second."
        )
    try:
        task = build(cfg)
        task.check()
    except RuntimeError as error:  # torch's, e.g. for a model that memory cannot hold
        raise ConfigError(f"the model {dict(cfg['model'])} cannot be made here: {message_of(error)}") from error
    try:
        strategy.check_layers(LayerMap.from_module(task.new_model()), {})
    except ValueError as error:
        raise ConfigError(f"strategy {cfg['strategy'].get('name')}: {message_of(error)}") from error
    if strategy.fit_config().get("proximal_mu") and getattr(task, "solver", None) == "ols":
        raise ConfigError(
            "task.solver=ols is exact and pulled to no model, which this strategy asks for; set task.solver=sgd or "
            "another strategy."
        )
    if type(strategy).sent_to is not UpdateStrategy.sent_to and cfg["evaluation"]["mode"] == "server":
        logger.warning(
            "evaluation=server sees the global model only, not what each client receives; set evaluation=federated"
        )
    if task.personal and cfg["evaluation"]["mode"] == "server":
        raise ConfigError(
            f"client.ditto_lambda={cfg['client']['ditto_lambda']} trains personal models, which evaluation.mode=server "
            "cannot see; set evaluation=federated, or client.ditto_lambda=null."
        )
    if not any(task.test_size(cid) for cid in range(cfg["num_clients"])):
        raise ConfigError(
            "no client has a sample to test on; raise dataset.test_fraction, or give clients at least 2 samples."
        )
    return task


def _check_checkpoint(checkpoint: Any) -> None:
    if not isinstance(checkpoint, Mapping) or {"every", "keep"} - set(checkpoint):
        raise ConfigError(f"checkpoint={checkpoint!r} must hold every and keep, as in checkpoint.every=10.")
    _known("checkpoint", checkpoint, {"every", "keep"})
    every, keep = checkpoint["every"], checkpoint["keep"]
    _require("checkpoint.every", every, "an integer of at least 1, or null for none", every is None or is_count(every))
    _require("checkpoint.keep", keep, "an integer of at least 1", is_count(keep))


def _check_groups(cfg: Mapping[str, Any]) -> None:
    evaluation, sim, tracking = cfg["evaluation"], cfg["simulation"], cfg["tracking"]
    _require(
        "evaluation.mode", evaluation["mode"], "server or federated", evaluation["mode"] in ("server", "federated")
    )
    for key in ("every", "batch_size"):
        _require(f"evaluation.{key}", evaluation[key], "an integer of at least 1", is_count(evaluation[key]))
    _require("simulation.engine", sim["engine"], f"one of {', '.join(ENGINES)}", sim["engine"] in ENGINES)
    _require("simulation.num_cpus", sim["num_cpus"], "an integer of at least 1", is_count(sim["num_cpus"]))
    for key in ("client_cpus", "client_gpus", "object_store_mb"):
        _require(f"simulation.{key}", sim[key], "a number of at least 0", is_real(sim[key]) and sim[key] >= 0)
    if sim["engine"] != "serial" and not sim["address"] and sim["object_store_mb"] < _LEAST_STORE_MB:
        raise ConfigError(
            f"simulation.object_store_mb={sim['object_store_mb']} is below {_LEAST_STORE_MB}, Ray's least; raise it."
        )
    _require("simulation.address", sim["address"], "auto, host:port or null", isinstance(sim["address"], str | None))
    if not sim["address"] and not 0 < sim["client_cpus"] <= sim["num_cpus"]:
        raise ConfigError(
            f"simulation.client_cpus={sim['client_cpus']} must be above 0 and at most simulation.num_cpus="
            f"{sim['num_cpus']}, or no client can ever start."
        )
    for key in ("tensorboard", "progress"):
        _require(f"tracking.{key}", tracking[key], "true or false", isinstance(tracking[key], bool))
    for key in ("udp_loss_delta", "udp_norm_delta"):
        _require(
            f"tracking.{key}", tracking[key], "a number of at least 0", is_real(tracking[key]) and tracking[key] >= 0
        )
    count = tracking["examples"]
    _require("tracking.examples", count, "an integer of at least 0", is_integer(count) and count >= 0)


def build_strategy(cfg: Mapping[str, Any], **given: Any) -> UpdateStrategy:
    """Make the strategy `cfg["strategy"]` describes; `given` are the arguments the suite itself supplies.

    Raises
    ------
    ConfigError
        If the class is unknown, or a value or a key is not one of its own.
    """
    options = dict(cfg["strategy"])
    target = options.pop("_target_", None)
    options.pop("name", None)
    try:
        module, _, name = str(target).rpartition(".")
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"strategy._target_={target!r} is not a class that can be imported.") from error
    if not (isinstance(cls, type) and issubclass(cls, UpdateStrategy)):
        raise ConfigError(f"strategy._target_={target!r} is not an UpdateStrategy; derive it from that.")
    reserved = _RESERVED & set(options)
    if reserved:
        raise ConfigError(f"strategy.{min(reserved)} is set by the suite itself; remove it from the configuration.")
    known = {
        name
        for base in inspect.getmro(cls)
        for name, p in inspect.signature(base).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    _known("strategy", options, known)
    try:
        return cls(**options, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"strategy {target}: {message_of(error)}") from error


def message_of(error: BaseException) -> str:
    """Return what an exception says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _known(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"{where} has no key {unknown[0]!r}; its keys are {', '.join(sorted(known))}.")


def _require(key: str, value: Any, wanted: str, ok: bool) -> None:
    if not ok:
        raise ConfigError(f"{key}={value!r} must be {wanted}.")
