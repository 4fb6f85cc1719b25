"""Tuned settings: the points of a strategy's grid (`conf/hparams`), and which of them a run takes.

A file of the group holds ``grid``, a mapping of configuration keys to the values tried, whose product (the last key
turning fastest) is the points 0, 1, ...; ``grids``, the grids of benchmarks that need one of their own; and ``best``,
the number of the best point per benchmark, null where nobody has tuned yet. The group is on only in the experiments
that choose it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from client_apps.errors import ConfigError
from strategies.options import is_integer


def points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the points of a grid, each a mapping of dotted configuration keys to values."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def grid_of(section: Any, benchmark: str | None) -> Mapping[str, Sequence[Any]] | None:
    """Return the grid of a benchmark in a file of the group; None if there is no usable one."""
    if not isinstance(section, Mapping):
        return None
    own = section.get("grids") or {}
    grid = own.get(benchmark, section.get("grid")) if isinstance(own, Mapping) else None
    usable = isinstance(grid, Mapping) and bool(grid) and all(isinstance(v, list) and v for v in grid.values())
    return grid if usable else None


def apply_point(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with the values of its point, or itself where no hparams are chosen.

    Parameters
    ----------
    cfg : DictConfig
        The composed configuration, interpolations not yet resolved: what refers to a tuned key follows it.
    overrides : sequence of str
        The words of the command line. A key set there keeps that value, whatever the point says.

    Raises
    ------
    ConfigError
        If there is no such point, none is known to be the best, or the grid has a key the configuration lacks.
    """
    section = OmegaConf.to_container(cfg.hparams) if cfg.get("hparams") is not None else None
    if section is None:
        return cfg
    file = f"conf/hparams/{cfg.strategy.name}.yaml"
    grid = grid_of(section, cfg.get("benchmark_name"))
    if grid is None:
        raise ConfigError(f"{file} needs a grid: a mapping of configuration keys to lists of values.")
    choices = points(grid)
    assert isinstance(section, dict)
    if section.get("strategy", cfg.strategy.name) != cfg.strategy.name:
        raise ConfigError(
            f"hparams={section['strategy']} are the settings of that strategy, not of {cfg.strategy.name}; choose the "
            "hparams of the strategy."
        )
    number = section.get("point")
    if number is None:
        number = _best(cfg, section.get("best") or {}, file, choices)
    if not is_integer(number) or not 0 <= number < len(choices):
        raise ConfigError(f"hparams.point={number!r}: {file} has the points 0 to {len(choices) - 1}.")
    cfg = copy.deepcopy(cfg)
    given = {word.key_or_group for word in OverridesParser.create().parse_overrides(list(overrides))}
    for key, value in choices[number].items():
        parent, _, leaf = key.rpartition(".")
        group = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(group, DictConfig) or leaf not in group.keys():  # noqa: SIM118  `in` skips unset values
            raise ConfigError(f"{file}: the grid sets {key}, which this configuration does not have.")
        if key not in given:
            OmegaConf.update(cfg, key, value)
    return cfg


def _best(cfg: DictConfig, best: Mapping[str, Any], file: str, choices: Sequence[Mapping[str, Any]]) -> Any:
    """Return the number of the best point: from the best.yaml that `tuned` names, else from the hparams file."""
    strategy, benchmark, tuned = cfg.strategy.name, cfg.get("benchmark_name"), cfg.get("tuned")
    advice = f"tune it with -m experiment=craft_tune benchmark={benchmark or 'NAME'}, or give hparams.point=K."
    if cfg.get("tuning_rounds") is not None and cfg.num_rounds == cfg.tuning_rounds:
        advice = "craft_tune is a sweep over points: add -m, or give hparams.point=K."
    if isinstance(tuned, str):
        try:
            found = yaml.safe_load(Path(tuned).read_text(encoding="utf-8"))
            entry = found[benchmark][strategy]
            number, settings = entry["point"], entry.get("settings") or {}
        except OSError as error:
            raise ConfigError(f"tuned={tuned} cannot be read ({error.strerror}); {advice}") from error
        except (LookupError, TypeError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{tuned} names no point of {strategy} for benchmark {benchmark}; {advice}") from error
        here = choices[number] if is_integer(number) and 0 <= number < len(choices) else {}
        for key, value in here.items():
            if settings.get(key, value) != value:
                raise ConfigError(
                    f"{tuned} was tuned with {key}={settings[key]} at point {number}, where {file} has {value} now; "
                    f"{advice}"
                )
        return number
    if best.get(benchmark) is None:
        raise ConfigError(f"{file} names no best point for benchmark {benchmark}; {advice[:-1]} or tuned=PATH.")
    return best[benchmark]
