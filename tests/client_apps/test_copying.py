"""The copying data: what is said follows from what is read, clients' mappings, contamination, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from client_apps.data import copying
from client_apps.data.copying import CopyingConfig
from client_apps.errors import ConfigError


def options(**changes: Any) -> CopyingConfig:
    return CopyingConfig(**{"name": "copying", "vocabulary": 12, "length": 5, "train_samples": 40, **changes})


def said(cid: int, config: CopyingConfig, seed: int = 0) -> np.ndarray:
    return copying.mapping(config, seed, cid)


@pytest.mark.parametrize("variant", ["plain", "shift"])
def test_a_sequence_is_letters_a_separator_and_what_becomes_of_them(variant: str) -> None:
    config = options(variant=variant, test_samples=30)
    train, test = copying.split(config, 3, 1)
    assert (train.tokens.shape, test.tokens.shape) == ((40, 11), (30, 11))
    assert (len(train), train.scored, train.tokens.dtype) == (40, 5, np.int64)
    for tokens in (train.tokens, test.tokens):
        assert (tokens[:, 5] == 12).all()
        letters = tokens[:, :5]
        assert set(letters.reshape(-1)) == set(range(12))
        assert np.array_equal(tokens[:, 6:], said(1, config, 3)[letters])


def test_plain_copying_replaces_nothing() -> None:
    assert said(0, options(variant="plain")).tolist() == list(range(12))


@pytest.mark.parametrize(("shifted", "moved"), [(4, 4), (None, 12)])
def test_a_shift_turns_a_circle_of_the_same_letters_for_all(shifted: int | None, moved: int) -> None:
    config = options(shifted=shifted, heterogeneous=True)
    maps = [said(cid, config) for cid in range(moved - 1)]
    circles = [np.flatnonzero(one != np.arange(12)) for one in maps]
    assert all(len(circle) == moved and np.array_equal(circle, circles[0]) for circle in circles)
    assert all(sorted(one) == list(range(12)) for one in maps)
    assert len({tuple(one) for one in maps}) == moved - 1  # a shift of its own for each
    # Shifts are powers of one turn, so that they commute.
    assert all(np.array_equal(one[other], other[one]) for one in maps for other in maps)
    assert np.array_equal(said(moved - 1, config), maps[0])


def test_homogeneous_clients_share_a_mapping_and_no_sequences() -> None:
    config = options()
    assert np.array_equal(said(0, config), said(7, config))
    assert not np.array_equal(said(0, config), said(0, config, seed=1))
    one, other = (copying.split(config, 0, cid) for cid in (0, 1))
    assert not np.array_equal(one[0].tokens, other[0].tokens)
    assert not np.array_equal(one[0].tokens, one[1].tokens[:40])


def test_splits_follow_from_seed_and_client_alone() -> None:
    config = options(noise=0.3)
    first, again, other = (copying.split(config, seed, 2, shuffled=True) for seed in (5, 5, 6))
    assert np.array_equal(first[0].tokens, again[0].tokens)
    assert np.array_equal(first[1].tokens, again[1].tokens)
    assert not np.array_equal(first[0].tokens, other[0].tokens)


def test_shuffling_permutes_what_is_said_in_training_and_nothing_else() -> None:
    config = options()
    (honest, test), (shuffled, same_test) = (copying.split(config, 0, 4, shuffled=on) for on in (False, True))
    assert np.array_equal(test.tokens, same_test.tokens)
    assert np.array_equal(honest.tokens[:, :6], shuffled.tokens[:, :6])
    assert np.array_equal(np.sort(honest.tokens[:, 6:], None), np.sort(shuffled.tokens[:, 6:], None))
    assert (honest.tokens[:, 6:] != shuffled.tokens[:, 6:]).mean() > 0.7  # 11 of 12 are other letters by chance


def test_noise_replaces_that_share_of_what_is_said_in_training() -> None:
    clean, noisy = (copying.split(options(noise=noise, train_samples=4000), 0, 0) for noise in (0.0, 0.3))
    assert np.array_equal(clean[1].tokens, noisy[1].tokens)
    assert np.array_equal(clean[0].tokens[:, :6], noisy[0].tokens[:, :6])
    # A random letter is the right one in 1 of 12 cases; 20,000 letters give a standard error of .003.
    changed = (clean[0].tokens[:, 6:] != noisy[0].tokens[:, 6:]).mean()
    assert changed == pytest.approx(0.3 * 11 / 12, abs=0.015)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": 1}, "dataset.vocabulary"),
        ({"length": 0}, "dataset.length"),
        ({"train_samples": 0}, "dataset.train_samples"),
        ({"test_samples": -1}, "dataset.test_samples"),
        ({"variant": "reverse"}, "one of plain, shift"),
        ({"shifted": 1}, "dataset.shifted"),
        ({"shifted": 13}, "exceeds the 12 letters"),
        ({"heterogeneous": 1}, "dataset.heterogeneous"),
        ({"heterogeneous": True, "variant": "plain"}, "needs dataset.variant=shift"),
        ({"noise": 1.5}, "dataset.noise"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        options(**changes)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
