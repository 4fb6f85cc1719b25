"""`python -m experiments.benchmarks.segmentation`: time and peak memory of one FeTS2022 client, held against 6 GiB.

An institution of synthetic subjects in full size, as many to train on as `dataset.cache_subjects` keeps. For the
defaults, smaller batches and larger patches, a process of its own, on the CPU and with one thread as every client has,
reads all files (`check`), trains for a round, and segments the test subjects. Peaks are those of the whole process,
with Python and all libraries; in a simulation in one process the strategy comes on top. The model segments after one
epoch, when it finds tumour nearly everywhere, which is the slowest case for the Hausdorff distance.
"""

from __future__ import annotations

import argparse
import csv
import io
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import ndimage

from client_apps.tasks import build
from experiments.config import compose

from .aggregation import Row, peak_resident, reset_peak
from .cells import answer, cell

_MODULE = "experiments.benchmarks.segmentation"  # whatever name it runs under

BOUND_GIB = 6.0
"""What a client may take; GiB are 2^30 bytes."""

SHAPE = (240, 240, 155)
SUBJECTS, QUICK_SUBJECTS = 10, 2
"""Of the institution: 8 to train on, which fill the default cache, and 2 to test on; or one and one."""

_ONE = "dataset.patches_per_subject=1"  # an epoch as long as that of the small patches; memory is the same
SETTINGS: dict[str, Sequence[str]] = {
    "defaults": (),
    "batch 2": ("client.batch_size=2",),  # as in experiment=fedref_fets2022
    "96³, batch 2": ("dataset.patch=[96,96,96]", "client.batch_size=2", _ONE),
    "96³, batch 8": ("dataset.patch=[96,96,96]", "client.batch_size=8", _ONE),
    "128³, batch 2": ("dataset.patch=[128,128,128]", "client.batch_size=2", _ONE),
}
"""What is measured: overrides of the defaults."""

PHASES = ("check", "train", "evaluate")
FIELDS = (
    "section", "what", "patch", "batch_size", "subjects", "patches", "check_seconds", "train_seconds",
    "evaluate_seconds", "start_gib", *(f"{phase}_gib" for phase in PHASES), "peak_gib", "of_bound", "note",
)  # fmt: skip
"""Columns of a row. Seconds are those of all `subjects`, of an epoch of `patches`, and of one test subject."""

_DISTINCT = 3
# What a tumour adds to each modality, by label: oedema, enhancing rim, necrotic core.
_CONTRAST = {
    "flair": {2: 220, 4: 160, 1: 90}, "t1": {2: -30, 4: 10, 1: -90}, "t1ce": {2: -10, 4: 260, 1: -80},
    "t2": {2: 190, 4: 130, 1: 240},
}  # fmt: skip


def volumes(number: int, shape: Sequence[int] = SHAPE) -> dict[str, NDArray[Any]]:
    """Make a subject: its four modalities in int16, and its segmentation in uint8.

    Intensities are 0 outside an ellipsoid of a brain, whose box is as large as usual: 136x172x139 of 240x240x155.
    """
    rng = np.random.default_rng(number)
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, size, dtype=np.float32) for size in shape), indexing="ij", sparse=True)
    brain = (x / 0.57) ** 2 + (y / 0.72) ** 2 + (z / 0.9) ** 2 <= 1
    a, b, c = rng.uniform(-0.2, 0.2, 3)
    distance = np.sqrt((x - a) ** 2 + (y - b) ** 2 + (z - c) ** 2) + 0.04 * _smooth(rng, shape)
    seg = np.zeros(shape, np.uint8)
    for label, radius in ((2, 0.26), (4, 0.17), (1, 0.12)):
        seg[(distance <= radius) & brain] = label
    found: dict[str, NDArray[Any]] = {"seg": seg}
    for modality, contrast in _CONTRAST.items():
        image = 400 + 50 * _smooth(rng, shape) + 15 * rng.standard_normal(shape, np.float32)
        for label, change in contrast.items():
            image[seg == label] += change
        found[modality] = np.where(brain, np.maximum(image, 1), 0).astype(np.int16)
    return found


def _smooth(rng: np.random.Generator, shape: Sequence[int]) -> NDArray[Any]:
    """Make a smooth random field."""
    coarse = rng.standard_normal((8, 8, 8), np.float32)
    field: NDArray[Any] = ndimage.zoom(coarse, [size / 8 for size in shape], order=1)
    return field


def write_institution(data_dir: Path, subjects: int, shape: Sequence[int] = SHAPE) -> None:
    """Write a FeTS2022 folder of one institution; after the third, subjects are further names of the same files."""
    import nibabel as nib

    from client_apps.data.fets2022 import FOLDER

    root = data_dir / FOLDER
    names = [f"FeTS2022_{number:05}" for number in range(subjects)]
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        if number >= _DISTINCT:
            twin = names[number % _DISTINCT]
            for file in (root / twin).iterdir():
                (root / name / file.name.replace(twin, name)).hardlink_to(file)
            continue
        for kind, values in volumes(number, shape).items():
            image = nib.Nifti1Image(values, np.diag([-1.0, -1.0, 1.0, 1.0]))
            nib.save(image, root / name / f"{name}_{kind}.nii.gz")
    rows = "".join(f"1,{name}\n" for name in names)
    (root / "partitioning_1.csv").write_text(f"Partition_ID,Subject_ID\n{rows}", "utf-8")


def measure(data_dir: str, overrides: Sequence[str]) -> Row:
    """Check, train and evaluate a client in this process, which should be a fresh one."""
    torch.set_num_threads(1)
    cfg = compose([
        "dataset=fets2022", "model=unet3d", "num_clients=1", "clients_per_round=1", f"data_dir={data_dir}",
        "client.device=cpu", *overrides,
    ])  # fmt: skip
    task = build(cfg)  # imports MONAI
    model = task.new_model()
    row: Row = {"start_gib": peak_resident() / 2**30}
    calls: dict[str, Callable[[], object]] = {
        "check": task.check,
        "train": lambda: task.train(model, 0, 1),
        "evaluate": lambda: task.evaluate(model, [0]),
    }
    for phase, call in calls.items():
        reset_peak()
        began = time.perf_counter()
        call()
        row[f"{phase}_seconds"] = time.perf_counter() - began
        row[f"{phase}_gib"] = peak_resident() / 2**30
    train, test = task.train_size(0), task.test_size(0)
    row["evaluate_seconds"] /= test
    row["peak_gib"] = max(value for key, value in row.items() if key.endswith("_gib"))
    return {
        "patch": "x".join(map(str, cfg["dataset"]["patch"])), "batch_size": cfg["client"]["batch_size"],
        "subjects": train + test, "patches": train * cfg["dataset"]["patches_per_subject"],
        **row, "of_bound": row["peak_gib"] / BOUND_GIB,
    }  # fmt: skip


def run(
    settings: Mapping[str, Sequence[str]] = SETTINGS,
    *,
    subjects: int = SUBJECTS,
    shape: Sequence[int] = SHAPE,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Measure every setting.

    Parameters
    ----------
    settings : mapping of str to sequence of str
        Names and overrides.
    subjects : int
        Of the institution, at least 2.
    shape : sequence of int
        Voxels of a volume.
    progress : callable
        Called with a line of text as each measurement starts.

    Returns
    -------
    list of dict
        Rows with the keys of `FIELDS`; a setting that fails has its reason under `note`.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        progress(f"segmentation: writing {min(subjects, _DISTINCT)} subjects of {'x'.join(map(str, shape))} ...")
        write_institution(Path(folder), subjects, shape)
        for what, overrides in settings.items():
            progress(f"segmentation: {what} ...")
            found = cell(_MODULE, "measure", data_dir=folder, overrides=list(overrides))
            rows.append({"section": "segmentation", "what": what, **found})
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Make a line of each setting: seconds, the peak of each phase, and the whole peak next to the bound."""
    found = Table(title=f"a FeTS2022 client on one CPU thread; bound: {BOUND_GIB:g} GiB",
                  caption="check and test: seconds a subject; memory: peaks of the whole process",
                  box=box.SIMPLE, padding=(0, 1, 0, 0))  # fmt: skip
    found.add_column("setting", no_wrap=True)
    for name in ("check\ns", "epoch\ns", "patch\ns", "test\ns", "check\nGiB", "train\nGiB", "test\nGiB", "peak\nGiB",
                 f"of\n{BOUND_GIB:g} GiB"):  # fmt: skip
        found.add_column(name, justify="right")
    for row in rows:
        if "note" in row:
            found.add_row(row["what"], row["note"][-80:])
            continue
        found.add_row(
            row["what"], f"{row['check_seconds'] / row['subjects']:.1f}", f"{row['train_seconds']:.0f}",
            f"{row['train_seconds'] / row['patches']:.1f}", f"{row['evaluate_seconds']:.0f}",
            *(f"{row[f'{phase}_gib']:.2f}" for phase in (*PHASES, "peak")), f"{row['of_bound']:.0%}",
        )  # fmt: skip
    return found


def save(rows: Sequence[Row], out: Path) -> None:
    """Write segmentation.csv into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    (out / "segmentation.csv").write_text(text.getvalue())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the defaults only, with one subject to train on")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        answer(args.cell, measure=measure)
        return
    console = Console()
    if missing := [name for name in ("monai", "nibabel") if find_spec(name) is None]:
        console.print(f"segmentation: skipped without {' and '.join(missing)}; pip install 'fedconcord[fets]'",
                      markup=False)  # fmt: skip
        return
    settings = {"defaults": SETTINGS["defaults"]} if args.quick else SETTINGS
    rows = run(settings, subjects=QUICK_SUBJECTS if args.quick else SUBJECTS, progress=console.print)
    console.print(table(rows))
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
