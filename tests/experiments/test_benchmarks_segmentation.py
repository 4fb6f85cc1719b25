"""The segmentation benchmark: its subjects look like FeTS2022's, a client is measured, and files are written."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from client_apps.data import fets2022
from experiments.benchmarks import segmentation
from experiments.config import compose

TINY = ("dataset.patch=[16,16,16]", "model.channels=[4,8]", "model.num_res_units=1", "client.batch_size=3")
SHAPE = (28, 24, 20)


def test_subjects_are_brains_with_a_tumour_of_nested_classes(tmp_path: Path) -> None:
    segmentation.write_institution(tmp_path, 4, SHAPE)
    root = fets2022.find_root(str(tmp_path), "partitioning_1.csv")
    ((*subjects,),) = fets2022.institutions(root / "partitioning_1.csv")
    assert len(subjects) == 4
    fets2022.check(root, subjects, fets2022.MODALITIES)
    first, *_, fourth = (fets2022.load(root, name, fets2022.MODALITIES) for name in subjects)
    np.testing.assert_array_equal(first.truth, fourth.truth)  # other names of the same files
    assert first.truth.shape == SHAPE
    share = np.prod(first.image.shape[1:]) / np.prod(SHAPE)
    assert 0.2 < share < 0.5  # the brain's box
    values, counts = np.unique(first.truth, return_counts=True)
    assert values.tolist() == [0, 1, 2, 4]
    assert counts[1:].sum() < 0.1 * counts[0]


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """A small client that was measured, and one that could not be."""
    failed = {"section": "segmentation", "what": "odd", "note": "failed: ConfigError: no"}
    return [*segmentation.run({"small": TINY}, subjects=3, shape=SHAPE), failed]


def test_a_client_is_measured_in_a_process_of_its_own(rows: list[dict]) -> None:
    small = rows[0]
    assert "note" not in small, small
    assert (small["patch"], small["batch_size"], small["subjects"], small["patches"]) == ("16x16x16", 3, 3, 8)
    assert all(small[f"{phase}_seconds"] > 0 for phase in segmentation.PHASES)
    peaks = [small[f"{phase}_gib"] for phase in ("start", *segmentation.PHASES)]
    assert small["peak_gib"] == max(peaks)
    assert min(peaks) > 0.1  # Python with torch and MONAI
    assert small["of_bound"] == pytest.approx(small["peak_gib"] / 6)


def test_rows_are_shown_and_saved(rows: list[dict], tmp_path: Path) -> None:
    table = segmentation.table(rows)
    assert "bound: 6 GiB" in table.title
    assert list(table.columns[0].cells) == ["small", "odd"]
    assert list(table.columns[1].cells)[1] == "failed: ConfigError: no"
    segmentation.save(rows, tmp_path)
    with (tmp_path / "segmentation.csv").open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == segmentation.FIELDS
    assert float(read[0]["peak_gib"]) == rows[0]["peak_gib"]
    assert (read[1]["peak_gib"], read[1]["note"]) == ("", "failed: ConfigError: no")


@pytest.mark.parametrize("what", segmentation.SETTINGS)
def test_every_setting_composes(what: str) -> None:
    compose(["dataset=fets2022", "model=unet3d", *segmentation.SETTINGS[what]])


def test_the_default_cache_is_full() -> None:
    """Of ten subjects the default test_fraction leaves as many to train on as are kept."""
    dataset = compose(["dataset=fets2022", "model=unet3d"])["dataset"]
    assert segmentation.SUBJECTS - round(segmentation.SUBJECTS * dataset["test_fraction"]) == dataset["cache_subjects"]


@pytest.mark.parametrize("library", ["monai", "nibabel"])
def test_without_the_extra_it_is_skipped(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    segmentation.main(["--out", str(tmp_path)])
    assert f"segmentation: skipped without {library}; pip install 'fedconcord[fets]'" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
