"""CINIC-10 (Darlow et al. 2018, arXiv 1810.03505): from its folders of PNG files, Parquet, or the hub."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from client_apps.data import folders, parquet, png
from client_apps.data.samples import Samples
from client_apps.errors import ConfigError

log = logging.getLogger(__name__)

SIDE, CHANNELS = 32, 3
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS = (("train",), ("valid", "validation"), ("test",))  # the names each goes by, in the order they are merged
COLUMNS = ("image", "label")
LOG_EVERY = 10_000  # images


def load(data_dir: Path | None, hub: str | None) -> Samples:
    """Read every image there is, train before valid before test, each by class and file name.

    Parameters
    ----------
    data_dir : Path or None
        Folder that holds `cinic10/` or `CINIC-10/` with the official `{train,valid,test}/<class>/*.png` (or those
        three folders themselves), or the hub's Parquet files under `flwrlabs/cinic10`; None reads the hub.
    hub : str or None
        Name on the hub.

    Raises
    ------
    ConfigError
        Nothing usable is there, a split or a class is missing, two are one folder, a class holds another folder, or
        something is unreadable or damaged.
    """
    if data_dir is None:
        return _from_parquet(parquet.from_hub(str(hub), COLUMNS))
    roots = [data_dir / "cinic10", data_dir / "CINIC-10", data_dir]
    for root in roots:
        if any(folders.is_dir(root / split / name) for names in SPLITS for split in names for name in CLASSES):
            return _from_folders(root)
    folder = data_dir / "flwrlabs" / "cinic10"
    if files := parquet.train_first(folder.glob("**/*.parquet")):
        for split in parquet.SPLITS:
            if not any(file.name.startswith(split) for file in files):
                raise ConfigError(f"{folder} lacks the {split}*.parquet files; fetch the data set again.")
        return _from_parquet(parquet.from_files(files, COLUMNS))
    raise ConfigError(
        f"No CINIC-10 in {', '.join(map(str, roots))} or {folder}; put its folders train, valid and test with the ten "
        "class folders or the hub's Parquet files there, or leave data_dir unset to read the hub."
    )


def _from_folders(root: Path) -> Samples:
    splits = [_split(root, names) for names in SPLITS]
    _refuse_links([split / name for split in splits for name in CLASSES])
    files = [file for split in splits for file in _files(split)]
    images = np.empty((len(files), CHANNELS, SIDE, SIDE), np.uint8)
    for row, (path, _) in enumerate(files):
        try:
            images[row] = png.decode(path.read_bytes(), CHANNELS, SIDE)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} must be a {SIDE}x{SIDE} PNG image, but {error}; fetch it again or remove it."
            ) from error
        if (row + 1) % LOG_EVERY == 0:
            log.info("Decoded %d of %d images of %s", row + 1, len(files), root)
    return Samples(images, np.array([label for _, label in files], np.int64), len(CLASSES))


def _split(root: Path, names: tuple[str, ...]) -> Path:
    found = [root / name for name in names if folders.is_dir(root / name)]
    if not found:
        raise ConfigError(f"{root} lacks the folder {' or '.join(names)}; fetch the data set again.")
    if len(found) > 1:
        raise ConfigError(f"{root} holds {' and '.join(names)}, which are one split; remove one of the two folders.")
    return found[0]


def _refuse_links(places: Iterable[Path]) -> None:
    """Refuse two classes, of one split or of two, that a link makes one folder."""
    seen: dict[Path, Path] = {}
    for place in places:
        if folders.is_dir(place):
            other = seen.setdefault(place.resolve(), place)
            if other != place:
                raise ConfigError(f"{place} and {other} are one folder, by a link; put the images of each class there.")


def _files(split: Path) -> list[tuple[Path, int]]:
    """List the image files of a split with their classes, sorted by class and name; only those in a class's folder."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension

    there, _ = folders.listing(split)
    if strange := sorted(set(there).difference(CLASSES)):
        raise ConfigError(
            f"{split / strange[0]} is none of CINIC-10's classes {', '.join(CLASSES)}; rename or remove the folder."
        )
    found = []
    for label, name in enumerate(CLASSES):
        folder = split / name
        if name not in there:
            raise ConfigError(f"{folder} is missing; fetch the data set again.")
        below, files = folders.listing(folder)
        if below:
            raise ConfigError(
                f"{folder / below[0]} is a folder, and images must lie directly in their class's; move its images up "
                "or remove it."
            )
        images = [(folder / file, label) for file in files if has_file_allowed_extension(file, IMG_EXTENSIONS)]
        if not images:
            raise ConfigError(f"{folder} holds no image; fetch the data set again.")
        found += images
    return found


def _from_parquet(parts: Iterable[parquet.Part]) -> Samples:
    images, labels = [], []
    for part in parts:
        parquet.check_class_names(part, "label", CLASSES)
        labels.append(parquet.labels(part, "label", len(CLASSES)))
        images.append(parquet.images(part, "image", CHANNELS, SIDE))
        log.info("Decoded %d images of %s", len(labels[-1]), part[0])
    return Samples(np.concatenate(images), np.concatenate(labels), len(CLASSES))
