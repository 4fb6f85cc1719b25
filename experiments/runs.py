"""Finished runs read back from their folders, and sorted into settings and strategies."""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strategies.options import is_integer, is_real

from .headline import HEADLINES, Headline, headline_of
from .metrics import rounds_to_target

# What says which repetition or which machine, not which experiment.
_ELSEWHERE = {"seed", "device", "data_dir"}
SIZES = ("num_clients", "clients_per_round", "num_rounds")
# Of every run, whatever its headline.
_NUMBERS = (
    "seconds",
    "train_loss",
    "path_length",
    "distance_from_start",
    "conflict_share_before",
    "conflict_share_after",
)
# Yes or no, or how many.
_COUNTS = ("failed_round", "clients_rejected")
# What changes the measures that are summed over evaluated rounds, and who evaluates.
_EVALUATION = ("mode", "every")
# What contaminated clients do, and what that is without any: part of the setting.
_ATTACK = {"attack": None, "attackers": 0, "attack_strength": 1.0}
# Of this size or beyond, sums and squares of numbers would not be finite.
_HUGE = 1e100


class _UnusableError(Exception):
    """Why a run cannot be compared, to follow the name of its folder."""


@dataclass(frozen=True)
class Run:
    """A finished run; ``setting`` and ``strategy`` are each a label and all that could tell it from another.

    ``headline`` is the metric it is judged by.
    """

    path: Path
    config: Mapping[str, Any]
    setting: tuple[str, Mapping[str, Any]]
    strategy: tuple[str, Mapping[str, Any]]
    rounds: Sequence[Mapping[str, Any]]
    headline: Headline

    def series(self, name: str) -> dict[int, float]:
        """Return a metric by round, in the rounds that report it."""
        return {row["round"]: row[name] for row in self.rounds if row.get(name) is not None}

    def result(self, name: str) -> float | None:
        """Return a metric in the last round that reports the headline."""
        return self.series(name).get(max(self.series(self.headline.name)))

    @property
    def score(self) -> float:
        """The headline in the last round that reports it."""
        return self.result(self.headline.name) or 0.0


@dataclass(frozen=True)
class Failure:
    """A run that ended in an error, its setting as in `Run` and its strategy by name alone."""

    path: Path
    config: Mapping[str, Any]
    setting: tuple[str, Mapping[str, Any]]
    name: str
    error: str


@dataclass(frozen=True)
class Row:
    """One strategy in one setting: its runs, one per seed, and per column the values of those that have one."""

    label: str
    runs: Sequence[Run]
    values: Mapping[str, Sequence[float]]

    def counted(self, name: str) -> int:
        """Sum a metric over all rounds and seeds."""
        return sum(int(value) for run in self.runs for value in run.series(name).values())


@dataclass(frozen=True)
class Group:
    """The strategies of one setting, best first."""

    title: str
    rows: Sequence[Row]
    target: float
    target_source: str

    @property
    def headline(self) -> Headline:
        """The metric that the setting is judged by."""
        return self.rows[0].runs[0].headline

    @property
    def facts(self) -> str:
        """How many clients and rounds, in words."""
        config = self.rows[0].runs[0].config
        clients, sample, rounds = (config[name] for name in SIZES)
        return f"{clients} {self.headline.client}s, {sample} per round, {rounds} rounds"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` for a nested mapping."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key not in _ELSEWHERE:
            flat[prefix + key] = value
    return flat


def _distinguish(items: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Append to each label the settings in which the items of that label differ."""
    labels = []
    for label, settings in items:
        peers = [other for name, other in items if name == label]
        differing = [key for key in settings if any(peer.get(key) != settings[key] for peer in peers)]
        labels.append(" ".join([label, *(f"{key}={settings[key]}" for key in differing)]))
    return labels


def _setting(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    dataset, model = config["dataset"], config["model"]
    kind = partition_kind(config)
    if kind == "dirichlet":
        kind = f"dirichlet({dataset['partition']['alpha']})"
    evaluation = config.get("evaluation") or {}  # a configuration of before may lack it
    stale, attack = _stale(config), _attack(config)
    words = [dataset["name"], model["name"], *([kind] if kind else [])]
    if dataset.get("contaminated"):
        words.append(f"contaminated: {dataset['contaminated']}")
    words += [f"{100 * stale:g} % stale answers"] if stale else []
    if attack["attack"]:
        words.append(f"{attack['attack']} by {attack['attackers']}")
    return (
        ", ".join(words),
        _flat(dataset, "dataset.")
        | _flat(model, "model.")
        | {name: config[name] for name in SIZES}
        | {"client.stale_update": stale}
        | {f"client.{key}": value for key, value in attack.items()}
        | {f"evaluation.{name}": evaluation[name] for name in _EVALUATION if name in evaluation},
    )


def _own(client: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in client.items() if key not in ("stale_update", *_ATTACK)}


def _solving(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the task but for its name, which the data set has already decided."""
    return {f"task.{key}": value for key, value in (config.get("task") or {}).items() if key != "name"}


def _attack(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what contaminated clients do, as `_stale` part of what strategies are compared under."""
    client = config["client"]
    if not client.get("attack"):
        return dict(_ATTACK)
    return {key: client.get(key, default) for key, default in _ATTACK.items()}


def partition_kind(config: Mapping[str, Any]) -> str | None:
    """Return how samples were dealt to clients; None of a data set whose samples are not dealt."""
    partition = config["dataset"].get("partition")
    return None if partition is None else str(partition["kind"])


def _stale(config: Mapping[str, Any]) -> float:
    """Return with which probability answers are stale: part of what strategies are compared under."""
    return float(config["client"].get("stale_update") or 0.0)


def _name(config: Mapping[str, Any]) -> str:
    strategy = config["strategy"]
    return str(strategy.get("name") or strategy["_target_"].rpartition(".")[2])


def _load(folder: Path) -> Run:
    for name in ("config.yaml", "status.json"):
        if not (folder / name).is_file():
            raise _UnusableError(f"has no {name}: still running, or killed")
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    if status["status"] != "finished":
        raise _UnusableError(" ".join(f"{status['status']}: {status['error']}".split()))
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    if status["rounds"] < config["num_rounds"]:
        raise _UnusableError(f"stopped after round {status['rounds']} of {config['num_rounds']}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = [json.loads(line) for line in lines]
    _require_rounds(rounds)
    headline = headline_of(rounds)
    if headline is None:
        raise _UnusableError(f"reports no {' and no '.join(known.name for known in HEADLINES)}")
    for row in rounds:
        for name in (*headline.results, *_NUMBERS):
            _require(_is_number(row.get(name)), name, row.get(name), "a number below 1e100", row)
        for name in _COUNTS:
            _require(_is_count(row.get(name)), name, row.get(name), "a count", row)
    run = Run(
        path=folder,
        config=config,
        setting=_setting(config),
        strategy=(
            _name(config),
            _flat(config["strategy"]) | _flat(_own(config["client"]), "client.") | _solving(config),
        ),
        rounds=rounds,
        headline=headline,
    )
    _require_settings(config)
    return run


def _require(ok: bool, name: str, value: object, wanted: str, row: Mapping[str, Any] | None = None) -> None:
    if not ok:
        where = "" if row is None else f" in round {row['round']}"
        raise _UnusableError(f"is damaged: {name}={' '.join(reprlib.repr(value).split())}{where} is not {wanted}")


def _require_rounds(rounds: Sequence[Any]) -> None:
    for number, row in enumerate(rounds, 1):
        if not isinstance(row, Mapping):
            raise _UnusableError(f"is damaged: line {number} of metrics.jsonl is no record of a round")
        found = row.get("round")
        ok = is_integer(found) and 0 <= found < 2**31
        _require(ok, f"round of line {number}", found, "an integer of at least 0")


def _require_settings(config: Mapping[str, Any]) -> None:
    """Require the numbers among the settings that a report counts with."""
    _require(is_integer(config["seed"]), "seed", config["seed"], "an integer")
    target, tracking = config.get("target_accuracy"), config.get("tracking")
    _require(_is_number(target), "target_accuracy", target, "a number below 1e100")
    for name in ("udp_loss_delta", "udp_norm_delta"):
        delta = tracking.get(name) if isinstance(tracking, Mapping) else None
        _require(_is_number(delta), f"tracking.{name}", delta, "a number below 1e100")


def _is_number(value: object) -> bool:
    return value is None or (is_real(value) and abs(value) < _HUGE)


def _is_count(value: object) -> bool:
    return value is None or isinstance(value, bool) or (is_integer(value) and 0 <= value < _HUGE)


def is_aside(name: str) -> bool:
    """Say whether a folder's name is that of a run moved aside: reports pass it over."""
    return re.fullmatch(r".+\.aside\d+", name) is not None


def _folders(folders: Iterable[Path]) -> list[Path]:
    """Return the runs' folders at any depth, but for those moved aside."""
    found = {
        path.resolve().parent
        for folder in folders
        for path in folder.rglob("metrics.jsonl")
        if not any(map(is_aside, path.relative_to(folder).parts))
    }
    return sorted(found)


UNREADABLE = (
    AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, yaml.YAMLError, OmegaConfBaseException,
)  # fmt: skip
"""What reading a damaged run raises."""


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs below the folders, and a sentence for each that cannot be used."""
    runs, left_out = [], []
    for path in _folders(folders):
        try:
            runs.append(_load(path))
        except _UnusableError as error:
            left_out.append(f"{path} {error}")
        except UNREADABLE as error:
            left_out.append(f"{path} cannot be read: " + " ".join(f"{type(error).__name__}: {error}".split()))
    return runs, left_out


def find_failures(folders: Iterable[Path]) -> list[Failure]:
    """Return the runs below the folders that ended in an error, as far as they can be read."""
    failures = []
    for path in _folders(folders):
        try:
            status = json.loads((path / "status.json").read_text(encoding="utf-8"))
            if status["status"] == "finished":
                continue
            config: Any = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
            failures.append(Failure(path, config, _setting(config), _name(config), str(status["error"])))
        except UNREADABLE:
            continue  # find_runs names it
    return failures


def group_runs(runs: Sequence[Run], target: float | None, left_out: list[str]) -> list[Group]:
    """Sort the runs into settings and strategies; a repeated seed joins those left out."""
    settings: dict[tuple[str, Headline], list[Run]] = {}
    for title, run in zip(_distinguish([run.setting for run in runs]), runs, strict=True):
        settings.setdefault((title, run.headline), []).append(run)
    groups = []
    for (title, headline), members in settings.items():
        seeds: dict[str, dict[Any, Run]] = {}
        for label, run in zip(_distinguish([run.strategy for run in members]), members, strict=True):
            of_label, seed = seeds.setdefault(label, {}), run.config.get("seed")
            if seed in of_label:
                left_out.append(f"{of_label[seed].path} has the settings and the seed of {run.path}, used instead")
            of_label[seed] = run
        kept = {label: list(of_label.values()) for label, of_label in seeds.items()}
        goal, source = _target(kept, target)
        rows = [Row(label, of_label, _values(of_label, goal)) for label, of_label in kept.items()]
        judged = headline.benign if all(row.values[headline.benign] for row in rows) else headline.name
        rows.sort(key=lambda row: -fmean(row.values[judged]))
        groups.append(Group(title, rows, goal, source))
    return groups


def _target(runs: Mapping[str, Sequence[Run]], target: float | None) -> tuple[float, str]:
    if target is not None:
        return target, "as asked for"
    configured: set[Any] = {run.config.get("target_accuracy") for of_label in runs.values() for run in of_label}
    if len(configured) == 1 and None not in configured:
        return configured.pop(), "target_accuracy of the runs"
    best = max(fmean(run.score for run in of_label) for of_label in runs.values())
    return 0.9 * best, "90 % of the best result, as the runs share no target_accuracy"


def _values(runs: Sequence[Run], target: float) -> dict[str, list[float]]:
    headline = runs[0].headline
    values: dict[str, list[float | None]] = {name: [run.result(name) for run in runs] for name in headline.results}
    scores = [run.series(headline.name) for run in runs]
    values["rounds_to_target"] = [rounds_to_target(list(s), list(s.values()), target) for s in scores]
    values["seconds"] = [run.rounds[-1].get("seconds") for run in runs]
    return {name: [value for value in column if value is not None] for name, column in values.items()}
