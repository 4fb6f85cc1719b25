"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): from Parquet, the official binary files, or the hub."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client_apps.data import parquet
from client_apps.data.samples import Samples, check_labels
from client_apps.errors import ConfigError

SIDE, CHANNELS = 32, 3


@dataclass(frozen=True)
class Variant:
    """Where one of the two data sets keeps its files and its labels.

    Parameters
    ----------
    name : str
        As people write it.
    num_classes : int
        Number of classes.
    parquet : str
        Folder of the hub's Parquet files, relative to the hub's root.
    column : str
        Label column there.
    binary : str
        Folder of the official binary version.
    parts : tuple[str, ...]
        Patterns of its files, train before test.
    label_bytes : int
        Bytes before the pixels of a record; the last one is the label used (CIFAR-100: coarse, fine).
    pickle : str
        Folder of the official Python version, which is never read.
    """

    name: str
    num_classes: int
    parquet: str
    column: str
    binary: str
    parts: tuple[str, ...]
    label_bytes: int
    pickle: str


CIFAR10 = Variant(
    "CIFAR-10",
    num_classes=10,
    parquet="uoft-cs/cifar10/plain_text",
    column="label",
    binary="cifar-10-batches-bin",
    parts=("data_batch_*.bin", "test_batch.bin"),
    label_bytes=1,
    pickle="cifar-10-batches-py",
)
CIFAR100 = Variant(
    "CIFAR-100",
    num_classes=100,
    parquet="uoft-cs/cifar100/cifar100",
    column="fine_label",
    binary="cifar-100-binary",
    parts=("train.bin", "test.bin"),
    label_bytes=2,
    pickle="cifar-100-python",
)

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


def load(variant: Variant, data_dir: Path | None, hub: str | None) -> Samples:
    """Read every image there is, official train before test.

    Parameters
    ----------
    variant : Variant
        CIFAR10 or CIFAR100 (fine labels).
    data_dir : Path or None
        Folder that holds the hub's Parquet layout (or the last part of it) or the official binary
        version; None reads the hub.
    hub : str or None
        Name on the hub.

    Raises
    ------
    ConfigError
        Nothing usable is there, or a file is damaged.
    """
    if data_dir is None:
        return _merge(variant, _decode(variant, parquet.from_hub(str(hub), ["img", variant.column])))
    # data_dir may be the root of the hub's layout or a folder further down.
    steps = variant.parquet.split("/")
    folders = [data_dir.joinpath(*steps[skip:]) for skip in range(len(steps))]
    for folder in folders:
        if files := parquet.train_first(folder.glob("*.parquet")):
            return _merge(variant, _decode(variant, parquet.from_files(files, ["img", variant.column])))
    binary = data_dir / variant.binary
    if files := [file for pattern in variant.parts for file in sorted(binary.glob(pattern))]:
        return _merge(variant, (_read_binary(variant, file) for file in files))
    if (data_dir / variant.pickle).exists():
        raise ConfigError(
            f"{data_dir / variant.pickle} holds pickle files, which are never loaded; put {variant.name}'s "
            f"binary version ({variant.binary}) or its Parquet files ({variant.parquet}) there instead."
        )
    raise ConfigError(
        f"No {variant.name} in {', '.join(map(str, [*folders, binary]))}; put its Parquet files from the "
        f"hub or its binary version there, or leave data_dir unset to read the hub."
    )


def _decode(variant: Variant, parts: Iterable[parquet.Part]) -> Iterable[Arrays]:
    for part in parts:
        labels = parquet.labels(part, variant.column, variant.num_classes)
        yield parquet.images(part, "img", CHANNELS, SIDE), labels


def _read_binary(variant: Variant, file: Path) -> Arrays:
    record = variant.label_bytes + CHANNELS * SIDE * SIDE
    raw = np.fromfile(file, np.uint8)
    if raw.size == 0 or raw.size % record:
        raise ConfigError(
            f"{file} is truncated: {raw.size} bytes are no whole number of {record}-byte records; fetch it again."
        )
    rows = raw.reshape(-1, record)
    labels = rows[:, variant.label_bytes - 1].astype(np.int64)
    check_labels(labels, variant.num_classes, str(file))
    return rows[:, variant.label_bytes :].reshape(-1, CHANNELS, SIDE, SIDE), labels


def _merge(variant: Variant, parts: Iterable[Arrays]) -> Samples:
    images, labels = zip(*parts, strict=True)
    return Samples(np.concatenate(images), np.concatenate(labels), variant.num_classes)
