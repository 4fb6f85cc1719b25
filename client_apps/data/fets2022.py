"""FeTS2022 (Pati et al. 2021, arXiv 2105.05874): brain tumours in MRI volumes, one client an institution."""

from __future__ import annotations

import csv
import gzip
import logging
import math
import os
import reprlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
import torch
from monai.transforms import (
    Compose,
    ConvertToMultiChannelBasedOnBratsClasses,
    ConvertToMultiChannelBasedOnBratsClassesd,
    CropForegroundd,
    FgBgToIndicesd,
    NormalizeIntensityd,
    RandCropByPosNegLabeld,
    RandFlipd,
    SpatialPadd,
)
from nibabel.affines import voxel_sizes
from nibabel.filebasedimages import ImageFileError
from nibabel.orientations import aff2axcodes
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError
from numpy.typing import NDArray
from torch import Tensor

from client_apps.config import PartitionConfig, at_least_zero, choice, fraction, integer, read
from client_apps.data import folders
from client_apps.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = "MICCAI_FeTS2022_TrainingData"
MODALITIES = ("flair", "t1", "t1ce", "t2")
SEG = "seg"
LABELS = (0, 1, 2, 4)
"""Background, necrotic and non-enhancing core, oedema, enhancing tumour."""
CLASSES = ("wt", "tc", "et")
"""Whole tumour (labels 1, 2, 4), tumour core (1, 4) and enhancing tumour (4): they lie in each other."""

# MONAI's ConvertToMultiChannelBasedOnBratsClasses makes the channels TC, WT, ET.
_TO_CLASSES = [1, 0, 2]
# What nibabel, gzip and NumPy raise for damaged files, truncated and with wrong bytes.
_DAMAGE = (OSError, EOFError, zlib.error, ValueError, OverflowError, ImageFileError, HeaderDataError, WrapStructError)
_PROGRESS = 100  # subjects between two lines of the log
_THREADS = 8
_COLUMNS = ("Partition_ID", "Subject_ID")
_LONGEST_NAME = 255  # bytes, on the usual file systems
_MOST_DIGITS = 18  # of an institution's number
_ORIENTATION = "LPS"  # where the axes of a FeTS volume point: left, posterior, superior
# Where the corners of two files of a subject may lie apart: so many mm, and so much of the distance from the first.
_APART_MM, _APART_SHARE = 1e-2, 1e-3
_LARGEST = 1e15  # intensity; the sum of so many squares, over any volume that fits in memory, is finite in float32


@dataclass(frozen=True)
class FetsConfig:
    """Which subjects there are and how they are cut into patches and tested: `dataset` with the name fets2022.

    Parameters
    ----------
    name : {"fets2022"}
        The data set.
    partitioning : str
        CSV beside the subjects with the columns Partition_ID and Subject_ID.
    modalities : list of str
        Input channels in this order, of `MODALITIES`.
    patch : list of three int
        Voxels of a training patch and of a window of the evaluation.
    patches_per_subject : int
        Patches of each training subject in an epoch.
    tumour_share : float
        Probability that a patch is centred on a voxel of the whole tumour instead of one of the rest of the brain.
    augment : {"none", "flip"}
        Whether patches are mirrored, along each axis with probability 1/2.
    cache_subjects : int or None
        Preprocessed subjects that a process keeps in memory (full size, four modalities: about 80 MB each); None
        keeps all.
    window_overlap : float
        Share of a window that its neighbour covers too, in [0, 1).
    window_batch : int
        Windows that pass through the model together.
    test_fraction : float
        Share of every institution's subjects held out for evaluation, in [0, 1).
    partition : Mapping
        Its kind is "natural": the institutions are the clients.
    max_samples : int or None
        Cap on an institution's subjects before they are split.
    """

    name: str
    partition: Mapping[str, Any]
    partitioning: str = "partitioning_1.csv"
    modalities: Sequence[str] = MODALITIES
    patch: Sequence[int] = (64, 64, 64)
    patches_per_subject: int = 4
    tumour_share: float = 0.5
    augment: str = "flip"
    cache_subjects: int | None = 8
    window_overlap: float = 0.25
    window_batch: int = 4
    test_fraction: float = 0.2
    max_samples: int | None = None

    def __post_init__(self) -> None:
        choice("dataset.name", self.name, ("fets2022",))
        kind = read(PartitionConfig, self.partition, "dataset.partition").kind
        if kind != "natural":
            raise ConfigError(
                f"dataset.partition.kind={kind} is not for dataset=fets2022, whose clients are the institutions of "
                "dataset.partitioning; use natural."
            )
        if not isinstance(self.partitioning, str) or not _is_name(self.partitioning):
            raise ConfigError(
                "dataset.partitioning must be the name of a CSV file beside the subjects, not "
                f"{_short(self.partitioning)}."
            )
        if not isinstance(self.modalities, list | tuple) or not self.modalities:
            raise ConfigError(
                f"dataset.modalities must be a list of at least one of {', '.join(MODALITIES)}, "
                f"not {self.modalities!r}."
            )
        for modality in self.modalities:
            choice("each of dataset.modalities", modality, MODALITIES)
        if len(set(self.modalities)) < len(self.modalities):
            raise ConfigError(f"dataset.modalities={list(self.modalities)} names one twice; remove it.")
        if not isinstance(self.patch, list | tuple) or len(self.patch) != 3:
            raise ConfigError(f"dataset.patch must be a list of three sizes in voxels, not {self.patch!r}.")
        for size in self.patch:
            integer("each of dataset.patch", size, 1)
        integer("dataset.patches_per_subject", self.patches_per_subject, 1)
        fraction("dataset.tumour_share", self.tumour_share)
        choice("dataset.augment", self.augment, ("none", "flip"))
        if self.cache_subjects is not None:
            integer("dataset.cache_subjects", self.cache_subjects, 1)
        at_least_zero("dataset.window_overlap", self.window_overlap, below=1)
        integer("dataset.window_batch", self.window_batch, 1)
        at_least_zero("dataset.test_fraction", self.test_fraction, below=1)
        if self.max_samples is not None:
            integer("dataset.max_samples", self.max_samples, 1)


@dataclass(frozen=True, eq=False)
class Subject:
    """A preprocessed subject.

    Parameters
    ----------
    image : Tensor of float32, shape (modalities, h, w, d)
        The bounding box of the brain. Each modality has mean 0 and variance 1 over its non-zero voxels; the others
        are 0.
    label : Tensor of uint8, shape (1, h, w, d)
        `LABELS` in that box.
    tumour, brain : Tensor of int64, shape (k,)
        Flat indices into the box: whole tumour, and the rest of the brain. Where one would be empty it holds the other.
    truth : ndarray of uint8, shape (H, W, D)
        `LABELS` in the whole volume.
    start : tuple of int
        Where the box begins in the volume.
    spacing : tuple of float
        Edges of a voxel in mm.
    """

    image: Tensor
    label: Tensor
    tumour: Tensor
    brain: Tensor
    truth: NDArray[np.uint8]
    start: tuple[int, ...]
    spacing: tuple[float, ...]

    def whole(self, mask: Tensor) -> Tensor:
        """Put a mask of the box, (c, h, w, d), into the whole volume, (c, H, W, D): outside the brain it is False."""
        volume = torch.zeros(len(mask), *self.truth.shape, dtype=torch.bool)
        box = tuple(slice(low, low + size) for low, size in zip(self.start, mask.shape[1:], strict=True))
        volume[(slice(None), *box)] = mask.cpu()
        return volume


class Grid(NamedTuple):
    """Where the voxels of a file lie."""

    file: Path
    shape: tuple[int, ...]
    affine: NDArray[np.float64]
    """From indices to mm to the right, anterior and superior, (4, 4)."""

    @property
    def spacing(self) -> tuple[float, ...]:
        """Edges of a voxel in mm."""
        return tuple(float(size) for size in voxel_sizes(self.affine))

    @property
    def orientation(self) -> str:
        """Where the axes point: a letter each of left, right, posterior, anterior, superior, inferior; ? for none."""
        return "".join(code or "?" for code in aff2axcodes(self.affine))

    def corners(self) -> NDArray[np.float64]:
        """Return where the corner voxels lie in mm, (8, 3), the first voxel first."""
        indices = np.array(list(product(*((0, size - 1) for size in self.shape))), np.float64)
        return indices @ self.affine[:3, :3].T + self.affine[:3, 3]


def find_root(data_dir: str | None, partitioning: str) -> Path:
    """Return the folder that holds the subjects and the partitioning CSV.

    Parameters
    ----------
    data_dir : str or None
        That folder itself, or one that contains it as MICCAI_FeTS2022_TrainingData or under fets2022.
    partitioning : str
        Name of the CSV.

    Raises
    ------
    ConfigError
        `data_dir` is not set, there is no such CSV, or a folder cannot be read.
    """
    if data_dir is None:
        raise ConfigError(
            "dataset=fets2022 is not downloaded, as FeTS2022 needs a Synapse account; set data_dir to the folder that "
            f"holds {FOLDER}."
        )
    top = Path(data_dir)
    candidates = (top / FOLDER, top, top / "fets2022" / FOLDER, top / "fets2022")
    for root in candidates:
        if folders.is_file(root / partitioning):
            return root
    for root in candidates:
        if root.name == FOLDER and folders.is_dir(root):
            there = ", ".join(name for name in folders.listing(root)[1] if name.endswith(".csv")) or "none"
            raise ConfigError(
                f"There is no {partitioning} in {root}, where the CSV files are: {there}; set dataset.partitioning to "
                "one of them or put the file there."
            )
    raise ConfigError(
        f"No FeTS2022 in {top}: neither {FOLDER} nor {partitioning} is there; set data_dir to the folder that holds "
        f"{FOLDER} with the subjects and {partitioning}."
    )


def institutions(file: Path) -> list[list[str]]:
    """Read a partitioning CSV: the subjects of each institution by name, institutions in the order of their numbers.

    Raises
    ------
    ConfigError
        The file is unreadable or empty, lacks a column, or a row is odd or names a subject again.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{file} is not a readable CSV file ({error}); put the partitioning file there again."
        ) from error
    if len(rows) < 2:
        raise ConfigError(f"{file} names no subject; it needs a header {','.join(_COLUMNS)} and a row for each.")
    (_, header), *rows = rows
    for column in _COLUMNS:
        if column not in header:
            raise ConfigError(
                f"{file} has no column {column}; it needs the columns {' and '.join(_COLUMNS)}, separated by commas, "
                f"and its header is {_short(','.join(header))}."
            )
        if header.count(column) > 1:
            raise ConfigError(f"{file} has the column {column} twice; remove one of them.")
    places = [header.index(column) for column in _COLUMNS]
    found: dict[int, list[str]] = {}
    seen: set[str] = set()
    for line, row in rows:
        partition, subject = (row[place] if place < len(row) else "" for place in places)
        if not (partition.isascii() and partition.isdecimal() and len(partition) <= _MOST_DIGITS):
            raise ConfigError(
                f"{file}, line {line}: Partition_ID must be an integer of at least 0 with at most {_MOST_DIGITS} "
                f"digits, not {_short(partition)}; correct it."
            )
        if not _is_name(subject, suffix=max((_suffix(kind) for kind in (*MODALITIES, SEG)), key=len)):
            raise ConfigError(
                f"{file}, line {line}: Subject_ID must be the name of a subject's folder, not {_short(subject)}; "
                "correct it."
            )
        if subject in seen:
            raise ConfigError(f"{file} names {subject} twice; remove one of its rows.")
        seen.add(subject)
        found.setdefault(int(partition), []).append(subject)
    return [sorted(found[partition]) for partition in sorted(found)]


def check(root: Path, subjects: Sequence[str], modalities: Sequence[str]) -> None:
    """Read all files of the subjects, headers first, so that most of what is wrong is found at once.

    The files are then read by as many threads as there are cores, at most eight, each with one file in memory at a
    time; of several that cannot be used the first in order is told. A file that has been read and is unchanged since
    is not read again in this process.

    Raises
    ------
    ConfigError
        A folder or file is missing, unreadable or truncated, does not lie in the grid of the subject's others or is
        not oriented as FeTS is, or its values are not those of an image or segmentation.
    """
    for subject in subjects:
        _agree([_header(file) for file in _files(root, subject, modalities)])
    read_all = partial(_check_values, root, modalities)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for number, _ in enumerate(pool.map(read_all, subjects), start=1):
            if number % _PROGRESS == 0 or number == len(subjects):
                log.info("Checked %d of %d subjects of FeTS2022", number, len(subjects))


def _check_values(root: Path, modalities: Sequence[str], subject: str) -> None:
    for file in _files(root, subject, modalities):
        with _readable(file):
            status = file.stat()
        _checked(file, status.st_size, status.st_mtime_ns)


@cache
def _checked(file: Path, size: int, mtime_ns: int) -> None:
    _read(file)


def load(root: Path, subject: str, modalities: Sequence[str]) -> Subject:
    """Read and preprocess a subject.

    Raises
    ------
    ConfigError
        As `check`.
    """
    grids, volumes = zip(*(_read(file) for file in _files(root, subject, modalities)), strict=True)
    _agree(grids)
    image = torch.from_numpy(np.stack([values.astype(np.float32) for values in volumes[:-1]]))
    truth = np.ascontiguousarray(volumes[-1].astype(np.uint8))
    del volumes
    data = _PREPROCESS(
        {"image": image, "label": torch.from_numpy(truth)[None], "brain": (image != 0).any(dim=0, keepdim=True)}
    )
    tumour, brain = (data[f"label_{part}_indices"].as_tensor() for part in ("fg", "bg"))
    return Subject(
        # Copies: a box that is a view would keep the whole volume in memory.
        image=data["image"].as_tensor().clone(memory_format=torch.contiguous_format),
        label=data["label"].as_tensor().clone(memory_format=torch.contiguous_format),
        tumour=tumour if len(tumour) else brain,
        brain=brain if len(brain) else tumour,
        truth=truth,
        start=tuple(int(low) for low in data["foreground_start_coord"]),
        spacing=grids[-1].spacing,
    )


def tumour_size(root: Path, subject: str) -> int:
    """Return the number of voxels of a subject's whole tumour."""
    return int(np.count_nonzero(_read(_file(root, subject, SEG))[1]))


def raw_plane(root: Path, subject: str, modality: str, plane: int) -> NDArray[np.float32]:
    """Return an axial slice of a modality as it is stored, (H, W)."""
    _, values = _read(_file(root, subject, modality))
    return np.ascontiguousarray(values[:, :, plane].astype(np.float32))


def to_classes(labels: Tensor) -> Tensor:
    """Turn labels (h, w, d) into the masks of `CLASSES`, (3, h, w, d)."""
    masks: Tensor = _CONVERT(labels)[_TO_CLASSES]
    return masks


class Patches:
    """Random patches of subjects.

    Parameters
    ----------
    config : FetsConfig
        `patch`, `tumour_share` and `augment`.
    seed : int
        Decides them together with the order of calls; the global generators are neither read nor moved.
    """

    def __init__(self, config: FetsConfig, seed: int) -> None:
        keys = ("image", "label")
        share = float(config.tumour_share)
        flips = [RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)] if config.augment == "flip" else []
        # Where the brain is smaller than the patch, it is padded after the cut, which saves padding the volume.
        self._cut = Compose(
            [
                RandCropByPosNegLabeld(
                    keys,
                    label_key="label",
                    spatial_size=tuple(config.patch),
                    pos=share,
                    neg=1 - share,
                    num_samples=1,
                    fg_indices_key="tumour",
                    bg_indices_key="brain",
                    allow_smaller=True,
                ),
                SpatialPadd(keys, spatial_size=tuple(config.patch)),
                *flips,
                ConvertToMultiChannelBasedOnBratsClassesd("label"),
            ]
        ).set_random_state(seed=seed % 2**32)

    def draw(self, subject: Subject) -> tuple[Tensor, Tensor]:
        """Cut a patch: image (modalities, *patch) in float32, and the masks of `CLASSES`, (3, *patch), in float32."""
        (patch,) = self._cut(
            {"image": subject.image, "label": subject.label, "tumour": subject.tumour, "brain": subject.brain}
        )
        return patch["image"].as_tensor(), patch["label"].as_tensor()[_TO_CLASSES].float()


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_CONVERT = ConvertToMultiChannelBasedOnBratsClasses()
_PREPROCESS = Compose(
    [
        CropForegroundd(("image", "label", "brain"), source_key="brain", end_coord_key=None),
        FgBgToIndicesd("label", image_key="brain"),
        NormalizeIntensityd("image", nonzero=True, channel_wise=True),
    ]
)


def _is_name(text: str, suffix: str = "") -> bool:
    """Tell whether a text is one part of a path, so that a CSV cannot lead out of its folder, and short enough."""
    short = len((text + suffix).encode("utf-8", "replace")) <= _LONGEST_NAME
    return text not in ("", "..") and Path(text).name == text and short


def _short(value: Any) -> str:
    """Return a value for a message, which a text of any length must leave readable."""
    return _SHORT.repr(value)


def _suffix(kind: str) -> str:
    return f"_{kind}.nii.gz"


def _file(root: Path, subject: str, kind: str) -> Path:
    """Return where a modality or the segmentation of a subject lies, which is there."""
    folder = root / subject
    if not folders.is_dir(folder):
        raise ConfigError(
            f"{root} has no folder {subject}, which the partitioning CSV names; put it there or remove its row."
        )
    file = folder / f"{subject}{_suffix(kind)}"
    if not folders.is_file(file):
        what = "segmentation" if kind == SEG else f"modality {kind}"
        instead = "" if kind == SEG else ", leave the modality out of dataset.modalities"
        raise ConfigError(
            f"{folder} has no {file.name}, the {what} of {subject}; put it there{instead} or remove the subject from "
            "the partitioning CSV."
        )
    return file


def _files(root: Path, subject: str, modalities: Sequence[str]) -> list[Path]:
    """Return the files of a subject, the segmentation last."""
    return [_file(root, subject, kind) for kind in (*modalities, SEG)]


def _header(file: Path) -> Grid:
    with _readable(file):
        image = nib.Nifti1Image.from_filename(file)
    return _grid(file, image)


def _read(file: Path) -> tuple[Grid, NDArray[Any]]:
    """Read a file and check its values.

    Not by MONAI's LoadImaged, which stops before the check sum of the compression and does not name a damaged file.
    """
    with _readable(file):
        content = gzip.decompress(file.read_bytes())
        image = nib.Nifti1Image.from_bytes(content)
    grid = _grid(file, image)
    with _readable(file):
        needed = max(image.dataobj.offset, 0) + math.prod(grid.shape) * image.dataobj.dtype.itemsize
        if len(content) < needed:  # told before as much memory is asked for
            raise ValueError(f"its header asks for {needed} bytes and it has {len(content)}")
        with np.errstate(over="ignore", invalid="ignore"):  # by the header's scale; told below
            values = np.asanyarray(image.dataobj)
    if values.dtype.kind not in "iuf":
        raise ConfigError(f"{file} holds values of the type {values.dtype} instead of numbers; fetch the file again.")
    if file.name.endswith(_suffix(SEG)):
        known = np.zeros(values.shape, bool)
        for label in LABELS:
            known |= values == label
        if not known.all():
            raise ConfigError(
                f"{file} holds the label {values[~known][0]:g}, and those of a FeTS2022 segmentation are "
                f"{', '.join(map(str, LABELS))}; fetch the file again or correct its labels."
            )
    else:
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ConfigError(f"{file} holds NaN or infinite intensities; fetch the file again or remove the subject.")
        largest = max(-low, high)
        if largest > _LARGEST:
            raise ConfigError(
                f"{file} holds intensities up to {largest:.3g} in size, beyond {_LARGEST:g}, with which float32 cannot "
                "reckon; correct the scale in its header or remove the subject."
            )
        if not np.float32(largest):
            raise ConfigError(f"{file} is 0 everywhere; fetch the file again or remove the subject.")
    return grid, values


def _grid(file: Path, image: Any) -> Grid:
    shape = tuple(int(size) for size in image.shape)
    if len(shape) > 3 and min(shape) > 0 and set(shape[3:]) == {1}:
        raise ConfigError(
            f"{file} has the shape {shape} instead of three axes; store it without the last, for example after "
            "nibabel.squeeze_image."
        )
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"{file} has the shape {shape} instead of three axes; fetch the file again.")
    grid = Grid(file, shape, np.asarray(image.affine, np.float64))
    if not (np.isfinite(grid.affine).all() and min(grid.spacing) > 0):
        first = tuple(grid.affine[:3, 3].tolist())
        raise ConfigError(
            f"{file} has voxels of {grid.spacing} mm, the first at {first} mm; correct the affine in its header."
        )
    return grid


def _agree(grids: Sequence[Grid]) -> None:
    """Refuse files of a subject that do not lie in one grid, or in one that is oriented otherwise than FeTS."""
    first = grids[0]
    for other in grids[1:]:
        if other.shape != first.shape:
            raise ConfigError(
                f"{other.file} has the shape {other.shape} and {first.file.name} {first.shape}; the files of a subject "
                "must be of one shape, so fetch both again or remove the subject from the partitioning CSV."
            )
        if not np.allclose(other.spacing, first.spacing, rtol=1e-3):
            raise ConfigError(
                f"{other.file} has voxels of {other.spacing} mm and {first.file.name} of {first.spacing} mm; the files "
                "of a subject must be of one grid, so fetch both again or remove the subject from the partitioning CSV."
            )
        ours, theirs = first.corners(), other.corners()
        apart = np.linalg.norm(theirs - ours, axis=1)
        if (apart > _APART_MM + _APART_SHARE * np.linalg.norm(ours - ours[0], axis=1)).any():
            raise ConfigError(
                f"{other.file}, oriented {other.orientation}, has voxels {apart.max():.3g} mm away from those of "
                f"{first.file.name}, oriented {first.orientation}; the files of a subject must be of one grid, so "
                "resample one to the other, fetch both again or remove the subject from the partitioning CSV."
            )
    if first.orientation != _ORIENTATION:
        raise ConfigError(
            f"{first.file} and the subject's other files are oriented {first.orientation} instead of {_ORIENTATION} "
            "(axes to the left, posterior and superior), as FeTS2022 is; reorient them, for example with nibabel's "
            "as_reoriented, or remove the subject from the partitioning CSV."
        )


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror or error}); let this user read it.") from error
    except _DAMAGE as error:
        reason = " ".join(str(error).split()).rstrip(".").replace("; ", ", ") or type(error).__name__
        raise ConfigError(
            f"{file} is not a readable NIfTI file, it may be damaged or cut short ({reason}); fetch it again."
        ) from error
