"""Composing a run's configuration with Hydra, from the command line or from a Flower run config, and checking it."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra.utils
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from client_apps.errors import ConfigError
from client_apps.tasks import Task, build
from strategies import UpdateStrategy

from .engine import ENGINES

_TOP = {
    "seed", "num_clients", "num_rounds", "clients_per_round", "data_dir", "output_dir", "target_accuracy",
    "strategy", "dataset", "model", "client", "evaluation", "simulation", "tracking",
}  # fmt: skip
_GROUPS = {
    "evaluation": {"mode", "every", "batch_size"},
    "simulation": {"engine", "num_cpus", "client_cpus", "client_gpus", "object_store_mb"},
    "tracking": {"tensorboard", "progress"},
}
# What this suite, not the configuration, hands to a strategy.
_RESERVED = {
    "layers", "seed", "initial_parameters", "evaluate_fn", "evaluate_metrics_aggregation_fn", "partition_order",
    "fraction_fit", "fraction_evaluate", "min_fit_clients", "min_evaluate_clients", "min_available_clients",
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
            return to_dict(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the overrides {list(overrides)} do not compose: {message_of(error)}") from error


def from_run_config(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Compose the configuration a Flower run asks for in its run config: `overrides="strategy=craft seed=1"`.

    An output folder below the working directory of the process is chosen where the overrides name none.
    """
    try:
        overrides = shlex.split(str(run_config.get("overrides", "")))
    except ValueError as error:
        raise ConfigError(f"overrides={run_config.get('overrides')!r} cannot be split into words: {error}.") from error
    if not any(o.split("=")[0].lstrip("+~") == "output_dir" for o in overrides):
        overrides.append(f"output_dir={_quote(str(Path('outputs') / 'flwr-run'))}")
    return compose(overrides)


def to_dict(cfg: DictConfig) -> dict[str, Any]:
    """Resolve a composed configuration to plain Python values, without Hydra's own section."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ("hydra", "experiment")}


def check(cfg: Mapping[str, Any]) -> Task:
    """Refuse what cannot run, before any client starts, and return the task, its data loaded.

    Raises
    ------
    ConfigError
        One sentence: what is wrong, where, and what to do.
    """
    _known("the configuration", cfg, _TOP)
    for group, keys in _GROUPS.items():
        _known(group, cfg[group], keys)
    for key in ("num_clients", "num_rounds", "clients_per_round"):
        _integer(key, cfg[key], 1)
    _integer("seed", cfg["seed"], 0)
    _integer("evaluation.every", cfg["evaluation"]["every"], 1)
    _integer("evaluation.batch_size", cfg["evaluation"]["batch_size"], 1)
    if cfg["clients_per_round"] > cfg["num_clients"]:
        raise ConfigError(
            f"clients_per_round={cfg['clients_per_round']} exceeds num_clients={cfg['num_clients']}; lower the first "
            "or raise the second."
        )
    _choice("evaluation.mode", cfg["evaluation"]["mode"], ("server", "federated"))
    _choice("simulation.engine", cfg["simulation"]["engine"], ENGINES)
    sim = cfg["simulation"]
    if not 0 < sim["client_cpus"] <= sim["num_cpus"]:
        raise ConfigError(
            f"simulation.client_cpus={sim['client_cpus']} must be above 0 and at most simulation.num_cpus="
            f"{sim['num_cpus']}, or no client can ever start."
        )
    target = cfg["target_accuracy"]
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"target_accuracy={target} must lie in (0, 1]; accuracies are shares, not per cent.")
    build_strategy(cfg)
    task = build(cfg)
    task.check()
    return task


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
        cls = hydra.utils.get_class(str(target))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"strategy._target_={target!r} is not a class that can be imported.") from error
    if not issubclass(cls, UpdateStrategy):
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


def _integer(key: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}={value!r} must be an integer of at least {least}.")


def _choice(key: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(choices)}.")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
