"""FeTS2022: institutions from the CSV, preprocessing, patches, and every file that cannot be used."""

from __future__ import annotations

import contextlib
import errno
import gzip
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_apps.data import fets2022
from client_apps.data.fets2022 import FOLDER, MODALITIES, FetsConfig, Patches, Subject
from client_apps.errors import ConfigError

from . import fets

SUBJECT = "FeTS2022_00001"
TWO = ("flair", "t1ce")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    return fets.write(tmp_path_factory.mktemp("fets"))


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A folder with one subject, to damage."""
    return fets.write(tmp_path, {1: [SUBJECT]}, modalities=TWO)


def settings(**changes: Any) -> FetsConfig:
    return FetsConfig(**{"name": "fets2022", "partition": {"kind": "natural"}, "patch": [16, 16, 16]} | changes)


# The partitioning


def test_institutions_come_in_the_order_of_their_numbers_and_subjects_by_name(tmp_path: Path) -> None:
    file = tmp_path / "parts.csv"
    file.write_text("\ufeffSubject_ID, Partition_ID,Note\nb,10,\nz,2,x\n\nc,10,\na,10,\ny,1,\n", "utf-8")
    assert fets2022.institutions(file) == [["y"], ["z"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"parts.csv names no subject; it needs a header"),
        ("Partition_ID,Subject_ID\n", r"parts.csv names no subject"),
        ("Partition,Subject_ID\n1,a\n", r"parts.csv has no column Partition_ID; it needs the columns"),
        (
            "Partition_ID;Subject_ID\n1;a\n",
            r"no column Partition_ID; .* separated by commas, and its header is 'Partition_ID;Subject_ID'\.",
        ),
        ("a" * 9000 + "\n1\n", r"its header is 'a+\.\.\.a+'\."),
        ("Partition_ID,Subject_ID,Subject_ID\n1,a,b\n", r"parts.csv has the column Subject_ID twice; remove one of"),
        ("Subject_ID,Partition_ID, Partition_ID\na,1,1\n", r"parts.csv has the column Partition_ID twice; remove"),
        ("Partition_ID,Subject\n1,a\n", r"parts.csv has no column Subject_ID"),
        ("Partition_ID,Subject_ID\n1,a\n2,a\n", r"parts.csv names a twice; remove one of its rows"),
        (
            "Partition_ID,Subject_ID\n1,a\n-1,b\n",
            r"line 3: Partition_ID must be an integer of at least 0 with .*, not '-1'",
        ),
        (
            "Partition_ID,Subject_ID\n1.5,a\n",
            r"line 2: Partition_ID must be an integer of at least 0 with .*, not '1.5'",
        ),
        ("Partition_ID,Subject_ID\n²,a\n", r"line 2: Partition_ID must be an integer"),
        ("Partition_ID,Subject_ID\n,a\n", r"line 2: Partition_ID must be an integer of at least 0 with .*, not ''"),
        ("Partition_ID,Subject_ID\n1\n", r"line 2: Subject_ID must be the name of a subject's folder, not ''"),
        ("Partition_ID,Subject_ID\n1,../a\n", r"line 2: Subject_ID must be the name of a subject's folder, not '../a'"),
        ("Partition_ID,Subject_ID\n\n\n1,a\n\nx,b\n", r"line 6: Partition_ID must be .*, not 'x'"),
        (f"Partition_ID,Subject_ID\n{'7' * 5000},a\n", r"with at most 18 digits, not '7+\.\.\.7+'; correct it"),
        (
            f"Partition_ID,Subject_ID\n1,{'a' * 243}\n",
            r"line 2: Subject_ID must be .*, not 'a+\.\.\.a+'; correct",
        ),
        (f"Partition_ID,Subject_ID\n1,{'é' * 130}\n", r"line 2: Subject_ID must be the name of a subject's folder"),
        ('Partition_ID,Subject_ID\n1,"a\n2,b\n', r"parts.csv is not a readable CSV file \(.*\); put the partitioning"),
        ('Partition_ID,Subject_ID\n1,"a"b\n', r"parts.csv is not a readable CSV file \(.*\); put the partitioning"),
        ("Partition_ID,Subject_ID\n1,..\n", r"line 2: Subject_ID must be the name of a subject's folder, not '..'"),
    ],
)
def test_an_odd_partitioning_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "parts.csv"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        fets2022.institutions(file)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 300


def test_spaces_around_names_are_no_part_of_them(tmp_path: Path) -> None:
    file = tmp_path / "parts.csv"
    file.write_text(" Partition_ID , Subject_ID \n 2 , b \n1 ,a\t\n", "utf-8")
    assert fets2022.institutions(file) == [["a"], ["b"]]


def test_a_partitioning_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "parts.csv"
    file.write_bytes(b"\xff\xfe\x00\x00")
    with pytest.raises(ConfigError, match=r"parts.csv is not a readable CSV file \(.*\); put the partitioning file"):
        fets2022.institutions(file)


def test_the_folder_is_found_from_itself_and_from_above(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fets2022").symlink_to(folder.parent)
    for data_dir, root in ((folder, folder), (folder.parent, folder), (tmp_path, tmp_path / "fets2022" / FOLDER)):
        assert fets2022.find_root(str(data_dir), "partitioning_1.csv") == root


@pytest.mark.parametrize(
    ("data_dir", "message"),
    [
        (None, r"FeTS2022 needs a Synapse account; set data_dir to the folder that holds MICCAI_FeTS2022_TrainingData"),
        ("nowhere", r"No FeTS2022 in nowhere: neither MICCAI_FeTS2022_TrainingData nor parts.csv is there; set"),
    ],
)
def test_a_folder_that_is_not_there_is_refused(data_dir: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fets2022.find_root(data_dir, "parts.csv")


def test_a_partitioning_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no parts.csv in .*, where the CSV files are: partitioning_1.csv;"):
        fets2022.find_root(str(folder.parent), "parts.csv")


def test_a_folder_with_the_name_of_a_partitioning_is_none(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "partitioning_1.csv").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"There is no partitioning_1.csv in .*, where the CSV files are: none;"):
        fets2022.find_root(str(tmp_path), "partitioning_1.csv")


@pytest.mark.parametrize("data_dir", ["d" * 5000, "a\0b"], ids=["long", "zero byte"])
def test_a_folder_that_cannot_be_is_refused(data_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \((File name too long|embedded null byte)\); let this user"):
        fets2022.find_root(data_dir, "partitioning_1.csv")


@pytest.mark.parametrize("name", ["c" * 256, "é" * 128])
def test_a_partitioning_with_too_long_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"dataset.partitioning must be the name of a CSV file .*\.\.\."):
        settings(partitioning=name)


def closed(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Close a folder to this user, who may be root: nothing below it can be looked at, and it cannot be listed."""
    look, scan = Path.stat, os.scandir

    def refuse(path: Path) -> None:
        if place == path or place in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self != place:
            refuse(self)
        return look(self, **options)

    def scandir(path: Any) -> Any:
        refuse(Path(path))
        return scan(path)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "scandir", scandir)


def test_a_closed_folder_is_named(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        closed(patch, one)
        with pytest.raises(
            ConfigError, match=rf"{FOLDER}/partitioning_1.csv cannot be read \(Permission denied\); let"
        ):
            fets2022.find_root(str(one.parent), "partitioning_1.csv")
    closed(monkeypatch, one / SUBJECT)
    for use in (fets2022.check, lambda root, subjects, kinds: fets2022.load(root, SUBJECT, kinds)):
        with pytest.raises(
            ConfigError, match=r"_flair.nii.gz cannot be read \(Permission denied\); let this user read"
        ):
            use(one, [SUBJECT], TWO)


# Preprocessing


def test_classes_are_those_of_brats_in_the_order_of_their_names() -> None:
    masks = fets2022.to_classes(torch.tensor([[[0, 1, 2, 4]]], dtype=torch.uint8))
    assert fets2022.CLASSES == ("wt", "tc", "et")
    assert masks.dtype == torch.bool
    assert masks[:, 0, 0].int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]]


def test_intensities_are_normalised_over_the_brain_in_its_box(folder: Path) -> None:
    subject = fets2022.load(folder, SUBJECT, MODALITIES)
    stored = fets.arrays(1)
    brain = np.argwhere(stored["flair"] > 0)
    low, high = brain.min(0), brain.max(0) + 1
    box = tuple(map(slice, low, high))
    assert subject.start == tuple(low)
    assert subject.spacing == (1, 1, 1)
    assert subject.image.shape == (4, *(high - low))
    for channel, modality in zip(subject.image.double().numpy(), MODALITIES, strict=True):
        original = stored[modality][box].astype(np.float64)
        inside = original != 0
        expected = np.where(inside, (original - original[inside].mean()) / original[inside].std(), 0)
        np.testing.assert_allclose(channel, expected, atol=1e-5)
    np.testing.assert_array_equal(subject.label[0], stored["seg"][box])
    np.testing.assert_array_equal(subject.truth, stored["seg"])
    flat = subject.label.flatten()
    assert torch.equal(subject.tumour, torch.nonzero(flat).flatten())
    assert len(subject.brain) + len(subject.tumour) == (stored["flair"] > 0).sum()
    assert not flat[subject.brain].any()
    assert type(subject.image) is type(subject.label) is torch.Tensor
    assert subject.image.untyped_storage().nbytes() == subject.image.nbytes  # not the whole volume


def test_a_mask_of_the_box_finds_its_place_in_the_volume(folder: Path) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    whole = subject.whole(fets2022.to_classes(subject.label[0]))
    assert torch.equal(whole, fets2022.to_classes(torch.from_numpy(subject.truth)))


def test_values_stored_as_floats_or_with_a_scale_are_the_same(one: Path) -> None:
    before = fets2022.load(one, SUBJECT, TWO)
    for kind in (*TWO, "seg"):
        fets.save(one / SUBJECT / f"{SUBJECT}_{kind}.nii.gz", fets.arrays(1)[kind].astype(np.float64))
    after = fets2022.load(one, SUBJECT, TWO)
    assert torch.equal(before.image, after.image)
    assert torch.equal(before.label, after.label)


def test_tumour_outside_the_brain_counts(one: Path) -> None:
    seg = fets.arrays(1)["seg"].copy()
    seg[0, 0, 0] = 2
    fets.save(one / SUBJECT / f"{SUBJECT}_seg.nii.gz", seg)
    subject = fets2022.load(one, SUBJECT, TWO)
    assert subject.truth[0, 0, 0] == 2
    assert (subject.label > 0).sum() == (seg > 0).sum() - 1
    assert fets2022.tumour_size(one, SUBJECT) == (seg > 0).sum()


# Patches


def drawn(subject: Subject, count: int, seed: int = 0, **changes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    patches = Patches(settings(**changes), seed)
    return [patches.draw(subject) for _ in range(count)]


def test_patches_depend_on_the_seed_alone(folder: Path) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what must not matter
    torch.manual_seed(1)
    numpy_state, torch_state = np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    first = drawn(subject, 3, seed=2**62 + 5)
    assert np.random.get_state()[1].tolist() == numpy_state  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)
    again, other = drawn(subject, 3, seed=2**62 + 5), drawn(subject, 3, seed=6)
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(one[0], two[0]) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("patch", [[16, 16, 16], [8, 16, 12], [32, 8, 24]], ids=str)
def test_patches_have_their_size_also_where_the_brain_is_smaller(folder: Path, patch: list[int]) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    for image, masks in drawn(subject, 2, patch=patch):
        assert image.shape == (2, *patch)
        assert masks.shape == (3, *patch)
        assert image.dtype == masks.dtype == torch.float32
        assert type(image) is type(masks) is torch.Tensor
        assert ((masks == 0) | (masks == 1)).all()


def test_a_brain_smaller_than_the_patch_is_in_every_patch(folder: Path) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    image, masks = drawn(subject, 1, patch=[24, 24, 24], augment="none")[0]
    assert (image != 0).sum() == (subject.image != 0).sum()
    assert masks.sum() == fets2022.to_classes(subject.label[0]).sum()


@pytest.mark.parametrize(("share", "tumour"), [(1, {1.0}), (0, {0.0}), (0.5, {0.0, 1.0})])
def test_the_share_of_patches_centred_on_tumour(folder: Path, share: float, tumour: set[float]) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    found = drawn(subject, 30, patch=[1, 1, 1], tumour_share=share)
    assert {float(masks[0]) for _, masks in found} == tumour
    assert all((image != 0).all() for image, _ in found)  # of the brain


def test_image_and_masks_are_mirrored_together(folder: Path) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    image = (subject.label > 0).float() + torch.linspace(2, 3, subject.label.shape[1])[None, :, None, None]
    marked = Subject(image, *(getattr(subject, name) for name in list(Subject.__dataclass_fields__)[1:]))
    found = drawn(marked, 12, patch=[14, 14, 14], tumour_share=1)
    assert all(torch.equal((image >= 3).float()[0], masks[0]) for image, masks in found)
    ascending = {bool(image[0, -1, 0, 0] % 1 > image[0, 0, 0, 0] % 1) for image, _ in found}
    assert ascending == {True, False}
    plain = drawn(marked, 12, patch=[14, 14, 14], tumour_share=1, augment="none")
    assert all(image[0, -1, 0, 0] > image[0, 0, 0, 0] for image, _ in plain)


def test_drawing_leaves_the_subject_as_it_is(folder: Path) -> None:
    subject = fets2022.load(folder, SUBJECT, TWO)
    before = subject.image.clone(), subject.label.clone()
    drawn(subject, 5)
    assert torch.equal(subject.image, before[0])
    assert torch.equal(subject.label, before[1])


@pytest.mark.parametrize("label", [0, 2])
def test_subjects_without_tumour_or_nothing_else_give_patches(one: Path, label: int) -> None:
    flair = fets.arrays(1)["flair"]
    fets.save(one / SUBJECT / f"{SUBJECT}_seg.nii.gz", np.where(flair > 0, label, 0).astype(np.uint8))
    subject = fets2022.load(one, SUBJECT, TWO)
    for _, masks in drawn(subject, 4):
        assert bool(masks[0].any()) == (label > 0)


# Files that cannot be used

Damage = Callable[[Path, Path], None]  # the subject's folder, the modality's file


def rewritten(change: Callable[[np.ndarray], np.ndarray], kind: str = "t1ce", **options: Any) -> Damage:
    def damage(folder: Path, file: Path) -> None:
        fets.save(file.with_name(f"{SUBJECT}_{kind}.nii.gz"), change(fets.arrays(1)[kind]), **options)

    return damage


def bytes_changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder, file: file.write_bytes(change(file.read_bytes())) and None


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float64 if abs(value) > 1e38 else np.float32)
        values[12, 12, 10] = value
        return values

    return change


def label(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda seg: np.where(seg == 4, value, seg).astype(np.float32)


def without_edge(folder: Path, file: Path) -> None:
    raw = bytearray(gzip.decompress(file.read_bytes()))
    raw[280:296] = bytes(16)  # srow_x
    raw[252:256] = b"\0\0\2\0"  # qform_code 0, sform_code 2
    file.write_bytes(gzip.compress(bytes(raw)))


def moved(flips: tuple[int, ...] = (), order: tuple[int, ...] = (0, 1, 2), by: float = 0) -> Damage:
    """The same image in another orientation, with the affine that goes with it, `by` mm away."""

    def damage(folder: Path, file: Path) -> None:
        values, where = fets.arrays(1)["t1ce"], fets.affine()
        for axis in flips:
            where[:3, 3] += where[:3, axis] * (values.shape[axis] - 1)
            where[:3, axis] *= -1
            values = np.flip(values, axis)
        where[2, 3] += by
        fets.save(file, values.transpose(order), where=where[:, [*order, 3]])

    return damage


def turned(angle: float) -> Damage:
    def damage(folder: Path, file: Path) -> None:
        turn = np.eye(4)
        turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        fets.save(file, fets.arrays(1)["t1ce"], where=fets.affine() @ turn)

    return damage


def scaled_in_the_header(folder: Path, file: Path) -> None:
    raw = bytearray(gzip.decompress(file.read_bytes()))
    raw[112:116] = np.float32(1e35).tobytes()  # scl_slope
    file.write_bytes(gzip.compress(bytes(raw)))


def huge_headers(folder: Path, file: Path) -> None:
    for each in folder.iterdir():
        raw = bytearray(gzip.decompress(each.read_bytes()))
        raw[42:48] = np.int16([32767] * 3).tobytes()  # dim
        each.write_bytes(gzip.compress(bytes(raw)))


def nowhere(folder: Path, file: Path) -> None:
    raw = bytearray(gzip.decompress(file.read_bytes()))
    raw[292:296] = np.float32(np.nan).tobytes()  # the origin in srow_x
    raw[252:256] = b"\0\0\2\0"
    file.write_bytes(gzip.compress(bytes(raw)))


DAMAGES: list[tuple[str, Damage, str]] = [
    ("folder", lambda folder, file: shutil.rmtree(folder), r"has no folder FeTS2022_00001, which the partitioning CSV"),
    ("modality", lambda folder, file: file.unlink(), r"00001 has no FeTS2022_00001_t1ce.nii.gz, the modality t1ce of"),
    (
        "seg",
        lambda folder, file: (folder / f"{SUBJECT}_seg.nii.gz").unlink(),
        r"00001 has no FeTS2022_00001_seg.nii.gz, the segmentation of FeTS2022_00001; put it there or remove the",
    ),
    ("empty", bytes_changed(lambda data: b""), r"_t1ce.nii.gz is not a readable NIfTI file"),
    ("no gzip", bytes_changed(lambda data: b"PNG" + data), r"_t1ce.nii.gz is not a readable NIfTI file"),
    ("cut in the header", bytes_changed(lambda data: data[:60]), r"_t1ce.nii.gz is not a readable NIfTI file"),
    (
        "cut",
        bytes_changed(lambda data: data[: len(data) // 2]),
        r"_t1ce.nii.gz is not a readable .* cut short .*; fetch",
    ),
    ("cut at the end", bytes_changed(lambda data: data[:-6]), r"_t1ce.nii.gz is not a readable NIfTI file"),
    (
        "wrong check sum",
        bytes_changed(lambda data: data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]),
        r"_t1ce.nii.gz is not a readable NIfTI file",
    ),
    (
        "fewer values",
        bytes_changed(lambda data: gzip.compress(gzip.decompress(data)[:-100])),
        r"_t1ce.nii.gz is not a readable NIfTI file",
    ),
    (
        "no NIfTI",
        bytes_changed(lambda data: gzip.compress(b"x" * 5000)),
        r"_t1ce.nii.gz is not a readable NIfTI file",
    ),
    ("label 3", rewritten(label(3), "seg"), r"_seg.nii.gz holds the label 3, and .* are 0, 1, 2, 4; fetch the file"),
    ("label 0.5", rewritten(label(0.5), "seg"), r"_seg.nii.gz holds the label 0.5"),
    ("label NaN", rewritten(label(np.nan), "seg"), r"_seg.nii.gz holds the label nan"),
    (
        "shape",
        rewritten(lambda image: image[:-1]),
        r"_t1ce.nii.gz has the shape \(23, 24, 20\) and FeTS2022_00001_flair",
    ),
    ("seg's shape", rewritten(lambda seg: seg[..., :-1], "seg"), r"_seg.nii.gz has the shape \(24, 24, 19\) and"),
    (
        "spacing",
        rewritten(lambda image: image, spacing=(1, 1, 2)),
        r"_t1ce.nii.gz has voxels of \(1.0, 1.0, 2.0\) mm and",
    ),
    ("spacing 0", without_edge, r"_t1ce.nii.gz has voxels of \(0.0, .*\) mm, the first .*; correct the affine in"),
    (
        "four axes",
        rewritten(lambda image: image[..., None].repeat(2, -1)),
        r"_t1ce.nii.gz has the shape \(24, 24, 20, 2\) instead of three axes; fetch the file again",
    ),
    (
        "a last axis of 1",
        rewritten(lambda image: image[..., None]),
        r"_t1ce.nii.gz has the shape \(24, 24, 20, 1\) instead of .*; store it without the last, .*squeeze_image",
    ),
    (
        "mirrored",
        moved(flips=(0,)),
        r"_t1ce.nii.gz, oriented RPS, has voxels 23 mm away from those of FeTS2022_00001_flair.nii.gz, oriented LPS;",
    ),
    (
        "axes swapped",
        moved(order=(1, 0, 2)),
        r"_t1ce.nii.gz, oriented PLS, has voxels .* mm away from those of FeTS2022_00001_flair.nii.gz, oriented LPS;",
    ),
    ("origin", moved(by=50), r"_t1ce.nii.gz, .* 50 mm away from those of FeTS2022_00001_flair.nii.gz, .* of one grid"),
    ("origin by little", moved(by=0.1), r"_t1ce.nii.gz, .* 0.1 mm away from those of FeTS2022_00001_flair.nii.gz"),
    ("turned", turned(0.01), r"_t1ce.nii.gz, .* mm away from those of FeTS2022_00001_flair.nii.gz, .* of one grid"),
    (
        "origin NaN",
        nowhere,
        r"_t1ce.nii.gz has voxels of .* mm, the first at \(nan, .*\) mm; correct the affine in its",
    ),
    (
        "huge headers",
        huge_headers,
        r"_flair.nii.gz is not a readable .*its header asks for \d{14} bytes and it has \d+\); fetch it again",
    ),
    (
        "scale",
        scaled_in_the_header,
        r"_t1ce.nii.gz holds intensities up to .*e\+37 in size, beyond 1e\+15, .*; correct the scale in its header or",
    ),
    ("large", rewritten(with_value(-1e38)), r"_t1ce.nii.gz holds intensities up to 1e\+38 in size, beyond 1e\+15"),
    ("large integer", rewritten(lambda image: image.astype(np.int64) * 2**54), r"_t1ce.nii.gz holds intensities up to"),
    ("NaN", rewritten(with_value(np.nan)), r"_t1ce.nii.gz holds NaN or infinite intensities; fetch the file again"),
    ("infinite", rewritten(with_value(-np.inf)), r"_t1ce.nii.gz holds NaN or infinite intensities"),
    ("beyond float32", rewritten(with_value(1e300)), r"_t1ce.nii.gz holds intensities up to 1e\+300 in size, beyond"),
    ("below float32", rewritten(lambda image: image * 1e-300), r"_t1ce.nii.gz is 0 everywhere"),
    ("0", rewritten(np.zeros_like), r"_t1ce.nii.gz is 0 everywhere; fetch the file again or remove the subject"),
    (
        "complex",
        rewritten(lambda image: image.astype(np.complex64)),
        r"_t1ce.nii.gz holds values of the type complex64",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_a_file_that_cannot_be_used_is_named_before_training_and_in_it(one: Path, damage: Damage, message: str) -> None:
    fets2022.check(one, [SUBJECT], TWO)
    folder = one / SUBJECT
    damage(folder, folder / f"{SUBJECT}_t1ce.nii.gz")
    with pytest.raises(ConfigError, match=message) as checked:
        fets2022.check(one, [SUBJECT], TWO)
    with pytest.raises(ConfigError, match=message) as loaded:
        fets2022.load(one, SUBJECT, TWO)
    for error in (checked, loaded):
        text = str(error.value)
        assert SUBJECT in text
        assert "\n" not in text
        assert text.endswith(".")
        assert ". " not in text


@pytest.mark.parametrize(
    ("where", "code"),
    [(np.diag([1.0, 1, 1, 1]), "RAS"), (np.diag([-1.0, 1, 1, 1]), "LAS"), (fets.affine()[[1, 0, 2, 3]], "PLS")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_subject_oriented_otherwise_than_fets_is_refused(one: Path, where: np.ndarray, code: str) -> None:
    for kind in (*TWO, "seg"):
        fets.save(one / SUBJECT / f"{SUBJECT}_{kind}.nii.gz", fets.arrays(1)[kind], where=where)
    message = (
        rf"_flair.nii.gz and .* are oriented {code} instead of LPS \(.*\), as FeTS2022 is; reorient them, .* CSV\.$"
    )
    with pytest.raises(ConfigError, match=message):
        fets2022.check(one, [SUBJECT], TWO)
    with pytest.raises(ConfigError, match=message):
        fets2022.load(one, SUBJECT, TWO)


@pytest.mark.parametrize("damage", [moved(by=5e-3), turned(1e-4)], ids=["origin", "turned"])
def test_rounding_in_the_affine_is_none_of_these(one: Path, damage: Damage) -> None:
    damage(one / SUBJECT, one / SUBJECT / f"{SUBJECT}_t1ce.nii.gz")
    fets2022.check(one, [SUBJECT], TWO)


def test_the_largest_intensities_are_normalised(one: Path) -> None:
    before = fets2022.load(one, SUBJECT, TWO)
    for kind in TWO:
        image = fets.arrays(1)[kind]
        fets.save(one / SUBJECT / f"{SUBJECT}_{kind}.nii.gz", image * (1e15 / image.max()))
    fets2022.check(one, [SUBJECT], TWO)
    torch.testing.assert_close(fets2022.load(one, SUBJECT, TWO).image, before.image, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_byte_is_wrong_there_is_one_kind_of_error(one: Path, seed: int) -> None:
    """A header or its compression with random damage either reads as an image or is refused."""
    rng = np.random.default_rng(seed)
    file = one / SUBJECT / f"{SUBJECT}_t1ce.nii.gz"
    data = bytearray(file.read_bytes() if seed % 2 else gzip.decompress(file.read_bytes()))
    for place in rng.integers(0, 352, 6):
        data[place] = rng.integers(256)
    file.write_bytes(bytes(data) if seed % 2 else gzip.compress(bytes(data)))
    for read in (lambda: fets2022.check(one, [SUBJECT], TWO), lambda: fets2022.load(one, SUBJECT, TWO)):
        with contextlib.suppress(ConfigError):
            read()


def test_headers_are_read_before_any_file_is_read_fully(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise AssertionError(f"{file} was read")

    monkeypatch.setattr(fets2022, "_read", refuse)
    with pytest.raises(ConfigError, match=r"has no folder FeTS2022_99999"):
        fets2022.check(folder, ["FeTS2022_00002", "FeTS2022_99999"], TWO)


def test_what_has_been_checked_and_is_unchanged_is_not_read_again(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, files = fets2022._read, []
    monkeypatch.setattr(fets2022, "_read", lambda file: files.append(file) or read(file))
    with caplog.at_level(logging.INFO, "client_apps.data.fets2022"):
        fets2022.check(one, [SUBJECT], TWO)
    assert len(files) == 3
    assert "Checked 1 of 1 subjects" in caplog.text
    fets2022.check(one, [SUBJECT], TWO)
    assert len(files) == 3
    fets.save(one / SUBJECT / f"{SUBJECT}_flair.nii.gz", fets.arrays(2)["flair"])
    fets2022.check(one, [SUBJECT], TWO)
    assert len(files) == 4


def test_files_are_read_side_by_side_and_no_more_than_there_are_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, lock, reading, most = threading.Barrier(3), threading.Lock(), set(), []

    def read(file: Path) -> None:
        with lock:
            reading.add(file)
            most.append(len(reading))
        meet.wait(60)  # breaks unless three are read at once
        with lock:
            reading.remove(file)

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(fets2022, "_checked", lambda file, size, mtime: read(file))
    fets2022.check(folder, fets.SUBJECTS[:3], MODALITIES)
    assert (len(most), max(most)) == (15, 3)


def test_of_several_bad_files_the_first_in_order_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fets.write(tmp_path, modalities=TWO)
    for subject in fets.SUBJECTS[1:3]:
        fets.save(root / subject / f"{subject}_t1ce.nii.gz", np.zeros(fets.SHAPE, np.int16))
    later_failed, read = threading.Event(), fets2022._read

    def slow(file: Path) -> Any:
        if file.name.startswith(fets.SUBJECTS[1]):
            assert later_failed.wait(60)
        try:
            return read(file)
        except ConfigError:
            later_failed.set()
            raise

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(fets2022, "_read", slow)
    with pytest.raises(ConfigError, match=rf"{fets.SUBJECTS[1]}_t1ce.nii.gz is 0 everywhere"):
        fets2022.check(root, fets.SUBJECTS, TWO)


# Real subjects


@pytest.mark.parametrize("name", ["fets2022", "fets2022_2mm"])
def test_every_real_file_lies_in_the_grid_of_its_subject(data_dir: Path, name: str) -> None:
    subjects = [folder for folder in (data_dir / name / FOLDER).iterdir() if folder.is_dir()]
    assert len(subjects) == {"fets2022": 2, "fets2022_2mm": 9}[name]
    for folder in subjects:
        grids = [fets2022._header(file) for file in folder.glob("*.nii.gz")]
        assert len(grids) in (3, 5)
        fets2022._agree(grids)


def test_the_real_subjects_can_be_used(data_dir: Path) -> None:
    root = fets2022.find_root(str(data_dir / "fets2022_2mm"), "partitioning_flair_t1ce.csv")
    parts = fets2022.institutions(root / "partitioning_flair_t1ce.csv")
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1]
    subjects = [subject for part in parts for subject in part]
    fets2022.check(root, subjects, TWO)
    for name in subjects:
        subject = fets2022.load(root, name, TWO)
        assert subject.truth.shape == (120, 120, 77)
        assert subject.spacing == pytest.approx((2, 2, 2))
        wt, tc, et = fets2022.to_classes(torch.from_numpy(subject.truth)).sum((1, 2, 3)).tolist()
        assert wt > tc >= et
        # Tumour lies in the brain, so the box of the brain holds it: image and segmentation fit together.
        assert torch.equal(subject.whole(subject.label > 0)[0], torch.from_numpy(subject.truth > 0))
        inside = subject.image[:, subject.label[0] > 0]
        assert (inside != 0).float().mean() > 0.99
        assert inside[0].mean() > 0.5  # oedema is bright in FLAIR


def test_a_real_subject_in_full_size_can_be_used(data_dir: Path) -> None:
    root = fets2022.find_root(str(data_dir), "partitioning_1.csv")
    subject = fets2022.load(root, "FeTS2022_90001", MODALITIES)
    assert subject.truth.shape == (240, 240, 155)
    assert subject.spacing == pytest.approx((1, 1, 1))
    assert subject.image.nbytes < 80e6
    assert set(np.unique(subject.truth)) == {0, 1, 2, 4}


def test_the_official_partitionings_are_read(data_dir: Path) -> None:
    folder = data_dir / "fets2022" / "official_partitioning"
    for name, institutions, subjects in (("partitioning_1", 23, 1251), ("partitioning_2", 33, 1251)):
        parts = fets2022.institutions(folder / f"{name}.csv")
        assert (len(parts), sum(map(len, parts))) == (institutions, subjects)
    with pytest.raises(ConfigError, match=r"line 2: Partition_ID must be an integer of at least 0 with .*, not '-1'"):
        fets2022.institutions(folder / "validation.csv")
