"""FEMNIST (LEAF, Caldas et al. 2018): handwritten characters by writer, from JSON, Parquet or the hub."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_apps.data import parquet
from client_apps.data.samples import Samples
from client_apps.errors import ConfigError

SIDE, NUM_CLASSES = 28, 62
COLUMNS = ("image", "writer_id", "character")

Shard = tuple[str, NDArray[np.uint8], NDArray[np.int64]]  # writer, (n, 1, 28, 28), (n,)


def load(data_dir: Path | None, hub: str | None) -> Samples:
    """Read every writer's images, train before test, writers in sorted order.

    The polarity is the one stored; LEAF has ink 0 on paper 1.

    Parameters
    ----------
    data_dir : Path or None
        Folder with LEAF's `femnist/{train,test}/*.json` (or those two folders themselves) or the hub's
        Parquet files under `flwrlabs/femnist`; None reads the hub.
    hub : str or None
        Name on the hub.

    Raises
    ------
    ConfigError
        Nothing usable is there, or a file is damaged.
    """
    if data_dir is None:
        return _by_writer(_from_parquet(parquet.from_hub(str(hub), COLUMNS)))
    for root in (data_dir / "femnist", data_dir):
        if files := [f for split in ("train", "test") for f in sorted((root / split).glob("*.json"))]:
            return _by_writer(shard for file in files for shard in _from_leaf(file))
    folder = data_dir / "flwrlabs" / "femnist"
    if files := parquet.train_first(folder.glob("**/*.parquet")):
        return _by_writer(_from_parquet(parquet.from_files(files, COLUMNS)))
    raise ConfigError(
        f"No FEMNIST in {data_dir / 'femnist'}, {data_dir} or {folder}; put LEAF's train/*.json and "
        "test/*.json (preprocess.sh -s niid) or the hub's Parquet files there, or leave data_dir unset to "
        "read the hub."
    )


def _from_leaf(file: Path) -> Iterator[Shard]:
    try:
        users = json.loads(file.read_bytes())["user_data"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a LEAF file with the key 'user_data'; fetch it again.") from error
    if not isinstance(users, dict):
        raise ConfigError(f"{file} must map writers to samples under 'user_data'; fetch it again.")
    for writer, data in users.items():
        yield _check_leaf(file, writer, data)


def _check_leaf(file: Path, writer: str, data: Any) -> Shard:
    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{file}, writer {writer}: {what}; make the file again with LEAF.")

    try:
        pixels, labels = np.asarray(data["x"], np.float64), np.asarray(data["y"])
    except (KeyError, TypeError) as error:
        raise refuse("needs the keys 'x' and 'y' with lists of numbers") from error
    except ValueError as error:
        raise refuse(f"needs at least one image, each of {SIDE * SIDE} numbers") from error
    if pixels.ndim != 2 or pixels.shape[1] != SIDE * SIDE:
        raise refuse(f"needs at least one image, each of {SIDE * SIDE} numbers")
    if labels.shape != pixels.shape[:1]:
        raise refuse(f"has {len(pixels)} images but labels of shape {labels.shape}")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise refuse(f"labels must be integers in 0..{NUM_CLASSES - 1}")
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise refuse("pixels must lie in [0, 1]")
    images = np.round(pixels * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
    return writer, images, labels.astype(np.int64)


def _from_parquet(parts: Iterable[parquet.Part]) -> Iterator[Shard]:
    for part in parts:
        images = parquet.images(part, "image", channels=1, side=SIDE)
        labels = parquet.labels(part, "character", NUM_CLASSES)
        owners = np.array(part[1]["writer_id"].to_pylist(), dtype=np.str_)
        order = np.argsort(owners, kind="stable")
        writers, starts = np.unique(owners[order], return_index=True)
        for writer, rows in zip(writers, np.split(order, starts[1:]), strict=True):
            yield str(writer), images[rows], labels[rows]


def _by_writer(shards: Iterable[Shard]) -> Samples:
    images: dict[str, list[NDArray[np.uint8]]] = defaultdict(list)
    labels: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
    for writer, pixels, classes in shards:
        images[writer].append(pixels)
        labels[writer].append(classes)
    writers = sorted(images)
    sizes = [sum(map(len, labels[writer])) for writer in writers]
    return Samples(
        np.concatenate([block for writer in writers for block in images[writer]]),
        np.concatenate([block for writer in writers for block in labels[writer]]),
        NUM_CLASSES,
        np.repeat(np.array(writers, dtype=np.str_), sizes),
    )
