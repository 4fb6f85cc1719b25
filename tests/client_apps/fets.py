"""Small FeTS2022 folders: ellipsoid brains with a tumour of three nested balls, in NIfTI files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from client_apps.data.fets2022 import FOLDER, MODALITIES

SHAPE = (24, 24, 20)
SPACING = (1.0, 1.0, 1.0)
INSTITUTIONS = {1: ["FeTS2022_00001", "FeTS2022_00002"], 2: ["FeTS2022_00003", "FeTS2022_00004"], 3: ["FeTS2022_00005"]}
SUBJECTS = [subject for subjects in INSTITUTIONS.values() for subject in subjects]
# What the tumour adds to each modality, by label.
CONTRAST = {"flair": {2: 80, 1: 60, 4: 60}, "t1": {1: -40}, "t1ce": {4: 90, 1: -30}, "t2": {2: 60, 1: 90, 4: 50}}


def arrays(number: int, shape: Sequence[int] = SHAPE) -> dict[str, NDArray[Any]]:
    """A subject's images in int16 and its segmentation in uint8."""
    rng = np.random.default_rng(number)
    grid = np.stack(np.meshgrid(*(np.arange(size) for size in shape), indexing="ij"))
    middle = (np.array(shape) - 1) / 2
    brain = (((grid - middle[:, None, None, None]) / (0.4 * np.array(shape))[:, None, None, None]) ** 2).sum(0) <= 1
    centre = middle + rng.uniform(-2, 2, 3)
    distance = np.sqrt(((grid - centre[:, None, None, None]) ** 2).sum(0))
    seg = np.zeros(shape, np.uint8)
    for label, radius in ((2, 5.0), (1, 3.5), (4, 2.3)):
        seg[(distance <= radius) & brain] = label
    found: dict[str, NDArray[Any]] = {"seg": seg}
    for modality, contrast in CONTRAST.items():
        image = rng.normal(100, 5, shape)
        for label, change in contrast.items():
            image[seg == label] += change
        found[modality] = np.where(brain, np.maximum(image, 1), 0).astype(np.int16)
    return found


def affine(spacing: Sequence[float] = SPACING) -> NDArray[np.float64]:
    """The affine of FeTS: LPS, with its origin."""
    x, y, z = spacing
    found = np.diag([-x, -y, z, 1.0])
    found[1, 3] = 239
    return found


def save(
    file: Path,
    values: NDArray[Any],
    spacing: Sequence[float] = SPACING,
    *,
    where: NDArray[np.float64] | None = None,
) -> None:
    """Write a NIfTI file with the affine of FeTS, or another (`where`)."""
    nib.save(nib.Nifti1Image(values, affine(spacing) if where is None else where, dtype=values.dtype), file)


def write_csv(file: Path, institutions: Mapping[int, Sequence[str]]) -> None:
    rows = [f"{number},{subject}" for number, subjects in institutions.items() for subject in subjects]
    file.write_text("\n".join(["Partition_ID,Subject_ID", *rows, ""]), "utf-8")


def write(
    data_dir: Path,
    institutions: Mapping[int, Sequence[str]] = INSTITUTIONS,
    *,
    modalities: Sequence[str] = MODALITIES,
    shape: Sequence[int] = SHAPE,
    spacing: Sequence[float] = SPACING,
) -> Path:
    """Write a whole folder, and return where the subjects lie."""
    root = data_dir / FOLDER
    root.mkdir(parents=True)
    write_csv(root / "partitioning_1.csv", institutions)
    for subjects in institutions.values():
        for subject in subjects:
            (root / subject).mkdir()
            found = arrays(int(subject[-5:]), shape)
            for kind in (*modalities, "seg"):
                save(root / subject / f"{subject}_{kind}.nii.gz", found[kind], spacing)
    return root


def config(folder: Path | None, **changes: Any) -> dict[str, Any]:
    """Return a small run on such a folder, with `section__key=value` changes."""
    cfg: dict[str, Any] = {
        "seed": 0,
        "num_clients": 3,
        "data_dir": None if folder is None else str(folder),
        "dataset": {
            "name": "fets2022",
            "partition": {"kind": "natural"},
            "modalities": ["flair", "t1ce"],
            "patch": [16, 16, 16],
            "patches_per_subject": 2,
            "test_fraction": 0.5,
        },
        "model": {"name": "unet3d", "channels": [4, 8], "num_res_units": 1},
        "client": {"lr": 0.1, "momentum": 0.9, "batch_size": 2, "device": "cpu"},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = cfg
        for section in sections:
            target = target[section]
        target[key] = value
    return cfg
