"""Images in Parquet tables, from local files or from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from client_apps.data import png
from client_apps.data.samples import check_labels
from client_apps.errors import ConfigError

Part = tuple[str, pa.Table]  # where it came from, for messages, and its rows
SPLITS = ("train", "val", "test")  # how the names of splits begin ("valid", "validation"), as data sets are numbered


def train_first(files: Iterable[Path]) -> list[Path]:
    """Sort files by split, train, validation, test and then all others, and by name."""
    return sorted(files, key=lambda file: (_rank(file.name), file.as_posix()))


def _rank(name: str) -> int:
    return next((rank for rank, split in enumerate(SPLITS) if name.startswith(split)), len(SPLITS))


def from_files(files: Sequence[Path], columns: Sequence[str]) -> Iterator[Part]:
    """Read the columns of each file.

    Raises
    ------
    ConfigError
        A file is not readable as Parquet or lacks a column.
    """
    for file in files:
        try:
            with pq.ParquetFile(file) as reader:
                table = reader.read(columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{file} is not a readable Parquet file; fetch it again.") from error
        _require_columns(table, columns, str(file))
        yield str(file), table


def from_hub(hub: str, columns: Sequence[str]) -> Iterator[Part]:
    """Read the columns of every split of a hub data set, in the order of `train_first`.

    Raises
    ------
    ConfigError
        The hub cannot be reached, does not know the name, or the data set lacks a column.
    """
    import datasets

    try:
        splits = datasets.load_dataset(hub)
    except OSError as error:  # offline, unknown name and failed transfer are all OSErrors there
        raise ConfigError(
            f"The data set {hub} could not be read from the Hugging Face hub; connect to the network, "
            "or set data_dir to a folder that holds its files."
        ) from error
    for split in sorted(splits, key=lambda name: (_rank(name), name)):
        table = splits[split].with_format("arrow")[:]
        _require_columns(table, columns, f"{hub} ({split})")
        yield f"{hub} ({split})", table


def _require_columns(table: pa.Table, columns: Sequence[str], where: str) -> None:
    for column in columns:
        if column not in table.column_names:
            raise ConfigError(f"{where} has no column {column!r}; the data set needs the columns {', '.join(columns)}.")


def images(part: Part, column: str, channels: int, side: int) -> NDArray[np.uint8]:
    """Decode a column of PNG images into a uint8 array of shape (n, channels, side, side).

    Raises
    ------
    ConfigError
        An image is damaged or of another size.
    """
    where, table = part
    pixels = np.empty((len(table), channels, side, side), np.uint8)
    for row, cell in enumerate(table[column].to_pylist()):
        try:
            pixels[row] = png.decode(cell["bytes"], channels, side)
        except (ValueError, TypeError, KeyError) as error:  # the last two: no struct with bytes
            raise ConfigError(
                f"{where} holds no {side}x{side} PNG image in column {column!r}, row {row}; fetch it again."
            ) from error
    return pixels


def labels(part: Part, column: str, num_classes: int) -> NDArray[np.int64]:
    """Read a column of class numbers.

    Raises
    ------
    ConfigError
        A label is missing, not an integer, or outside 0..num_classes-1.
    """
    where, table = part
    values = table[column]
    if values.null_count or not pa.types.is_integer(values.type):
        raise ConfigError(f"{where} must hold an integer in every row of column {column!r}; fetch it again.")
    array: NDArray[np.int64] = values.to_numpy().astype(np.int64)
    check_labels(array, num_classes, where)
    return array


def check_class_names(part: Part, column: str, names: Sequence[str]) -> None:
    """Compare the order of the classes with the one that the hub's files state; a table without one passes.

    Raises
    ------
    ConfigError
        The classes of the column are others, or in another order.
    """
    from datasets import ClassLabel, Features

    where, table = part
    feature = Features.from_arrow_schema(table.schema).get(column)
    if isinstance(feature, ClassLabel) and feature.names != list(names):
        raise ConfigError(
            f"{where} numbers its classes {', '.join(feature.names)} in column {column!r}, and the data set needs "
            f"{', '.join(names)}; fetch it again."
        )
