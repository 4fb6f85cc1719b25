"""The sections of the composed configuration that a client reads, each checked when it is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from client_apps.errors import ConfigError

Section = TypeVar("Section")

ATTACKS = ("other_subspace", "scaled_noise", "sign_flip", "shuffled_labels")


def read(section: type[Section], values: Mapping[str, Any], where: str) -> Section:
    """Build a section from its keys.

    Parameters
    ----------
    section : type
        One of the dataclasses below.
    values : Mapping[str, Any]
        The keys as they stand in the configuration.
    where : str
        The section's own name, for the messages.

    Raises
    ------
    ConfigError
        A key is unknown or missing, or its value is out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a group of keys, not {values!r}.")
    known = fields(section)  # type: ignore[arg-type]
    only_known_keys(values, [f.name for f in known], where)
    for f in known:
        if f.default is MISSING and f.name not in values:
            raise ConfigError(f"{where}.{f.name} is missing; set it in the configuration.")
    return section(**values)


def only_known_keys(values: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first key that is not a known one."""
    known = list(known)
    for key in values:
        if key not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(f"{where}.{key} is not a known key; the known ones are: {names}.")


def integer(name: str, value: Any, low: int) -> None:
    """Raise ConfigError unless the value is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}.")


def choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ConfigError unless the value is one of those allowed."""
    allowed = list(allowed)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}.")


def boolean(name: str, value: Any) -> None:
    """Raise ConfigError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}.")


def positive(name: str, value: Any) -> None:
    """Raise ConfigError unless the value is a finite number above 0."""
    if not _finite(value) or value <= 0:
        raise ConfigError(f"{name} must be a number above 0, not {value!r}.")


def at_least_zero(name: str, value: Any, below: float = math.inf) -> None:
    """Raise ConfigError unless the value is a finite number in [0, below)."""
    if not _finite(value) or not 0 <= value < below:
        upper = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"{name} must be a number of at least 0{upper}, not {value!r}.")


def fraction(name: str, value: Any) -> None:
    """Raise ConfigError unless the value is a number in [0, 1]."""
    if not _finite(value) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1, not {value!r}.")


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


@dataclass(frozen=True)
class PartitionConfig:
    """How samples are dealt to clients: `dataset.partition`.

    Keys that belong to another kind are allowed and unused, so that overriding `kind` alone is enough.

    Parameters
    ----------
    kind : {"iid", "dirichlet", "shards", "natural"}
        Which partitioner.
    alpha : float
        Dirichlet concentration (dirichlet); small values give each client few classes.
    min_samples : int
        Fewest samples of a client (dirichlet); 2 leaves one to train on and one to test on.
    self_balancing : bool
        Give no more samples of later classes to clients already above the average size (dirichlet).
    shards_per_client : int
        Label-sorted shards dealt to each client (shards).
    """

    kind: str
    alpha: float = 0.1
    min_samples: int = 2
    self_balancing: bool = False
    shards_per_client: int = 2

    def __post_init__(self) -> None:
        choice("dataset.partition.kind", self.kind, ("iid", "dirichlet", "shards", "natural"))
        positive("dataset.partition.alpha", self.alpha)
        integer("dataset.partition.min_samples", self.min_samples, 1)
        boolean("dataset.partition.self_balancing", self.self_balancing)
        integer("dataset.partition.shards_per_client", self.shards_per_client, 1)


@dataclass(frozen=True)
class DatasetConfig:
    """Which samples there are and how each client splits its own: `dataset`.

    Parameters
    ----------
    name : str
        A key of `client_apps.data.SOURCES`.
    partition : Mapping
        See `PartitionConfig`.
    test_fraction : float
        Share of every client's samples held out for evaluation, in [0, 1).
    augment : {"none", "crop_flip"}
        What happens to training images.
    max_samples : int or None
        Cap on a client's samples before they are split.
    hub : str or None
        Hub data set read when there is no data_dir; None takes the data set's usual one.
    """

    name: str
    partition: Mapping[str, Any]
    test_fraction: float = 0.2
    augment: str = "none"
    max_samples: int | None = None
    hub: str | None = None

    def __post_init__(self) -> None:
        read(PartitionConfig, self.partition, "dataset.partition")
        at_least_zero("dataset.test_fraction", self.test_fraction, below=1)
        choice("dataset.augment", self.augment, ("none", "crop_flip"))
        if self.max_samples is not None:
            integer("dataset.max_samples", self.max_samples, 1)


@dataclass(frozen=True)
class ClientConfig:
    """Local training: `client`.

    Parameters
    ----------
    lr : float
        Learning rate of round 1.
    lr_decay : float
        Factor on the learning rate per round.
    momentum : float
        SGD momentum, in [0, 1).
    weight_decay : float
        L2 penalty.
    local_epochs : int
        Passes over the client's training split in a round.
    batch_size : int
        Samples of an SGD step.
    device : str
        "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:<index>".
    vectorize : bool or "auto"
        Whether clients are trained in stacks (`client_apps.vectorized`): where the model is made of linear
        layers and activations only ("auto"), always (True; an error where the model cannot) or never.
    ditto_lambda : float or None
        λ of Ditto: each client also trains a personal model, pulled to the global one by (λ/2)‖v − w‖², and keeps
        it; None is without.
    ditto_epochs : int or None
        Passes over the training split for the personal model; None is local_epochs. Unused without ditto_lambda.
    stale_update : float or None
        How likely a client answers a round with the global model of the last time it was sampled instead of its
        trained one, in [0, 1], None being 0; see `client_apps.stale`.
    attack : {"other_subspace", "scaled_noise", "sign_flip", "shuffled_labels"} or None
        What contaminated clients do instead of answering honestly; see `client_apps.attacks`.
    attackers : int or list of int
        The contaminated clients: their numbers, or how many of the last ones. None without an attack.
    attack_strength : float
        How long an attacker's update is, times the honest one's; unused where only the labels are shuffled.
    """

    lr: float
    batch_size: int
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    local_epochs: int = 1
    device: str = "auto"
    vectorize: bool | str = "auto"
    ditto_lambda: float | None = None
    ditto_epochs: int | None = None
    stale_update: float | None = None
    attack: str | None = None
    attackers: int | Sequence[int] = 0
    attack_strength: float = 1.0

    def __post_init__(self) -> None:
        positive("client.lr", self.lr)
        positive("client.lr_decay", self.lr_decay)
        at_least_zero("client.momentum", self.momentum, below=1)
        at_least_zero("client.weight_decay", self.weight_decay)
        integer("client.local_epochs", self.local_epochs, 1)
        integer("client.batch_size", self.batch_size, 1)
        if not isinstance(self.vectorize, bool) and self.vectorize != "auto":
            raise ConfigError(f"client.vectorize must be auto, true or false, not {self.vectorize!r}.")
        if self.ditto_lambda is not None:
            at_least_zero("client.ditto_lambda", self.ditto_lambda)
        if self.ditto_epochs is not None:
            integer("client.ditto_epochs", self.ditto_epochs, 1)
        if self.stale_update is not None:
            fraction("client.stale_update", self.stale_update)
        if self.attack is not None:
            choice("client.attack", self.attack, ATTACKS)
        positive("client.attack_strength", self.attack_strength)
        if isinstance(self.attackers, Sequence) and not isinstance(self.attackers, str):
            for cid in self.attackers:
                integer("client.attackers: each", cid, 0)
        else:
            integer("client.attackers", self.attackers, 0)

    def attacking(self, num_clients: int) -> frozenset[int]:
        """Return which of so many clients are contaminated.

        Raises
        ------
        ConfigError
            `attackers` names a client that there is not, or more than there are.
        """
        if self.attack is None:
            return frozenset()
        if isinstance(self.attackers, int):
            found = frozenset(range(num_clients - self.attackers, num_clients))
        else:
            found = frozenset(self.attackers)
        if found and (min(found) < 0 or max(found) >= num_clients):
            raise ConfigError(
                f"client.attackers={self.attackers!r} does not fit num_clients={num_clients}; they are numbered from 0."
            )
        return found
