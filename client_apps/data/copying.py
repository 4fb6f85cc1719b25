"""Copying: random sequences to be repeated after a separator, by each client in an alphabet of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from client_apps.config import boolean, choice, fraction, integer
from client_apps.errors import ConfigError

# Set the random streams apart; no client has such a number as the second word of its own.
_MAPPINGS, _TRAIN, _TEST, _SHUFFLE, _NOISE = 1 << 32, 1, 2, 3, 4


class Sequences(NamedTuple):
    """Token sequences of one length, of which a language model is to predict the end.

    Parameters
    ----------
    tokens : ndarray of int64, shape (n, t)
        What it reads and what it has to say.
    scored : int
        How many of the last tokens of each sequence it has to say; from 1 to t - 1.
    """

    tokens: NDArray[np.int64]
    scored: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class CopyingConfig:
    """Which sequences there are: `dataset`.

    Parameters
    ----------
    name : str
        "copying".
    vocabulary : int
        Letters of the alphabet, V; the separator comes on top.
    length : int
        Letters to copy, L.
    train_samples, test_samples : int
        Sequences of each client to train and to test on.
    variant : {"plain", "shift"}
        What is to follow the separator: the sequence as it is, or with some letters replaced. These letters, the same
        for all clients, form a circle, on which each is replaced by the one c places on; the others are copied.
    shifted : int or None
        How many letters the shift concerns, m, at least 2; None is all of them. Fewer letters let the updates of
        clients share a smaller row space.
    heterogeneous : bool
        Whether each client has a shift c of its own, from 1 to m - 1, instead of one for all; only where the variant
        is "shift". Of m - 1 clients in a row no two have the same.
    noise : float
        How likely a letter to be said in training is a random one, in [0, 1].
    """

    name: str
    vocabulary: int = 32
    length: int = 10
    train_samples: int = 32
    test_samples: int = 100
    variant: str = "shift"
    shifted: int | None = 6
    heterogeneous: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        choice("dataset.name", self.name, ("copying",))
        integer("dataset.vocabulary", self.vocabulary, 2)
        integer("dataset.length", self.length, 1)
        integer("dataset.train_samples", self.train_samples, 1)
        integer("dataset.test_samples", self.test_samples, 0)
        choice("dataset.variant", self.variant, ("plain", "shift"))
        if self.shifted is not None:
            integer("dataset.shifted", self.shifted, 2)
            if self.shifted > self.vocabulary:
                raise ConfigError(
                    f"dataset.shifted={self.shifted} exceeds the {self.vocabulary} letters of dataset.vocabulary; "
                    "lower the first or raise the second."
                )
        boolean("dataset.heterogeneous", self.heterogeneous)
        fraction("dataset.noise", self.noise)
        if self.heterogeneous and self.variant == "plain":
            raise ConfigError(
                "dataset.heterogeneous=true needs dataset.variant=shift, as plain copying is the same for all clients."
            )

    @property
    def tokens(self) -> int:
        """Number of different tokens: the letters 0 .. V - 1 and the separator V."""
        return self.vocabulary + 1

    @property
    def context(self) -> int:
        """Length of a whole sequence: the letters, the separator, the copy."""
        return 2 * self.length + 1


def mapping(config: CopyingConfig, seed: int, cid: int) -> NDArray[np.int64]:
    """Return what a client is to say for each letter: a permutation of 0 .. V - 1, drawn from the seed, (V,)."""
    found = np.arange(config.vocabulary)
    if config.variant == "plain":
        return found
    generator = np.random.default_rng([seed, _MAPPINGS])
    circle = generator.permutation(config.vocabulary)[: config.shifted]
    shifts = generator.permutation(np.arange(1, len(circle)))
    found[circle] = np.roll(circle, -shifts[cid % len(shifts) if config.heterogeneous else 0])
    return found


def split(config: CopyingConfig, seed: int, cid: int, *, shuffled: bool = False) -> tuple[Sequences, Sequences]:
    """Return what a client trains and what it tests on, drawn from (seed, cid).

    Parameters
    ----------
    config : CopyingConfig
        Options.
    seed, cid : int
        Of the run, and of the client, from 0.
    shuffled : bool
        Whether the letters to be said are permuted at random over the whole training split, so that they say nothing
        about the sequence they follow. What is read, and the test split, stay as they are.
    """
    mine = mapping(config, seed, cid)
    train = _draw(config, np.random.default_rng([seed, cid, _TRAIN]), config.train_samples, mine)
    test = _draw(config, np.random.default_rng([seed, cid, _TEST]), config.test_samples, mine)
    said = train.tokens[:, -config.length :]  # a view
    if config.noise:
        generator = np.random.default_rng([seed, cid, _NOISE])
        random = generator.integers(config.vocabulary, size=said.shape)
        said[...] = np.where(generator.random(said.shape) < config.noise, random, said)
    if shuffled:
        said[...] = np.random.default_rng([seed, cid, _SHUFFLE]).permutation(said.reshape(-1)).reshape(said.shape)
    return train, test


def plain(config: CopyingConfig, generator: np.random.Generator, count: int) -> Sequences:
    """Draw sequences that are copied as they are."""
    return _draw(config, generator, count, np.arange(config.vocabulary))


def _draw(config: CopyingConfig, generator: np.random.Generator, count: int, said: NDArray[np.int64]) -> Sequences:
    letters = generator.integers(config.vocabulary, size=(count, config.length))
    separator = np.full((count, 1), config.vocabulary)
    return Sequences(np.concatenate([letters, separator, said[letters]], axis=1).astype(np.int64), config.length)
