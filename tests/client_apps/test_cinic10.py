"""CINIC-10: the real images and their statistics, every accepted layout, and one clear sentence for each wrong one."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from client_apps import data
from client_apps.data import SOURCES, cinic10, png
from client_apps.data.cinic10 import CLASSES, load
from client_apps.data.partition import partition
from client_apps.errors import ConfigError
from client_apps.tasks import ClassificationTask

from .configs import config
from .test_data import assert_valid, random_images, write_parquet

SPLITS = ("train", "valid", "test")
NAMES = dict(enumerate(CLASSES))


def png_bytes(pixels: np.ndarray, format: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format)
    return stream.getvalue()


def png_of_16_bits(colour_type: int, channels: int) -> bytes:
    """A PNG file by the standard's own rules, as Pillow writes none of 16 bits in colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 32, 32, 16, colour_type, 0, 0, 0)
    rows = (b"\0" + bytes(range(2 * channels)) * 32) * 32  # of each row first its filter, none
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def colour(split: int, label: int) -> np.ndarray:
    """One flat image for each split and class."""
    return np.full((32, 32, 3), (10 * split, 20 * label, 7), np.uint8)


def write_folders(root: Path, splits: tuple[str, ...] = SPLITS) -> Path:
    """Write one image of each class into each split, as the official archive has them."""
    for split, name in enumerate(splits):
        for label, folder in NAMES.items():
            file = root / name / folder / f"{split}{label}.png"
            file.parent.mkdir(parents=True)
            file.write_bytes(png_bytes(colour(split, label)))
    return root


def hub_tables(*splits: str, names: tuple[str, ...] = CLASSES) -> datasets.DatasetDict:
    """Return what `datasets.load_dataset` would, one image of each class in each split, by class."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    tables = {}
    for split in splits:
        number = next(i for i, name in enumerate(SPLITS) if name[:3] == split[:3])
        cells = [{"bytes": png_bytes(colour(number, label)), "path": None} for label in NAMES]
        tables[split] = datasets.Dataset.from_dict({"image": cells, "label": list(NAMES)}, features=features)
    return datasets.DatasetDict(tables)


def assert_merged(samples: data.Samples) -> None:
    """Check for the images of `write_folders`: train, valid, test, each by class."""
    assert_valid(samples, "cinic10")
    assert samples.owners is None
    assert samples.labels.tolist() == [*range(10)] * 3
    expected = [colour(split, label).transpose(2, 0, 1) for split in range(3) for label in NAMES]
    np.testing.assert_array_equal(samples.images, np.stack(expected))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hub: str) -> None:
        pytest.fail("asked the hub although data_dir is set")

    monkeypatch.setattr("datasets.load_dataset", refuse)


def test_constants() -> None:
    # Mean and deviation as github.com/BayesWatch/cinic-10 prints them; classes are CIFAR-10's, in its order.
    source = SOURCES["cinic10"]
    assert source.mean == (0.47889522, 0.47227842, 0.43047404)
    assert source.std == (0.24205776, 0.23828046, 0.25874835)
    assert (source.channels, source.side, source.num_classes, source.hub) == (3, 32, 10, "flwrlabs/cinic10")
    assert CLASSES == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


# Real images: 1,000 / 500 / 500, equally many of each class.


def test_the_real_images_have_the_known_statistics(data_dir: Path) -> None:
    samples = data.load("cinic10", str(data_dir))
    assert_valid(samples, "cinic10")
    np.testing.assert_array_equal(samples.labels, np.concatenate([np.repeat(np.arange(10), n) for n in (100, 50, 50)]))
    # Means as the data's README states them; deviations near the official ones.
    pixels = samples.images / 255
    np.testing.assert_allclose(pixels.mean((0, 2, 3)), [0.479, 0.474, 0.436], atol=5e-4)
    np.testing.assert_allclose(pixels.std((0, 2, 3)), SOURCES["cinic10"].std, atol=2e-3)


def test_shared_images_are_cifar10s_bit_for_bit(data_dir: Path) -> None:
    # cifar10-train-<index>.png is the image of that number in CIFAR-10's official order.
    ours, cifar = data.load("cinic10", str(data_dir)), data.load("cifar10", str(data_dir))
    files = [
        file for split in SPLITS for name in CLASSES for file in sorted((data_dir / "cinic10" / split / name).iterdir())
    ]
    shared = {
        row: int(file.stem.split("-")[-1]) for row, file in enumerate(files) if file.stem.startswith("cifar10-train-")
    }
    pairs = [(row, number) for row, number in shared.items() if number < 20_000]  # as many as are at hand
    assert len(shared) == 468
    assert pairs
    for row, number in pairs:
        assert ours.labels[row] == cifar.labels[number]
        np.testing.assert_array_equal(ours.images[row], cifar.images[number])


@pytest.mark.parametrize("options", [{"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.1, "min_samples": 20}], ids=str)
def test_the_real_images_are_dealt_completely_and_by_seed(data_dir: Path, options: dict[str, Any]) -> None:
    labels = data.load("cinic10", str(data_dir)).labels
    first, again, other = (partition(labels, None, num_clients=20, seed=seed, **options) for seed in (0, 0, 1))
    np.testing.assert_array_equal(np.sort(np.concatenate(first)), np.arange(2000))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    sizes = {len(part) for part in first}
    assert sizes == {100} if options["kind"] == "iid" else min(sizes) >= 20


@pytest.mark.parametrize("model", [{"name": "cnn"}, {"name": "resnet", "depth": 20}], ids=lambda model: model["name"])
def test_local_training_lowers_the_training_loss(data_dir: Path, model: dict[str, Any]) -> None:
    cfg = config(
        num_clients=4,
        dataset={"name": "cinic10", "partition": {"kind": "iid"}, "augment": "crop_flip"},
        model=model,
        client={"lr": 0.05, "momentum": 0.5, "local_epochs": 3, "batch_size": 20, "device": "cpu"},
        data_dir=str(data_dir),
    )
    task = ClassificationTask(cfg)
    net = task.new_model()
    before = task.evaluate(net, [0], "train")
    assert before.num_examples.tolist() == [400]
    task.train(net, 0, 1)
    after = task.evaluate(net, [0], "train")
    assert after.loss_sum[0] < 0.95 * before.loss_sum[0]


# The official folders.


@pytest.mark.parametrize("below", ["cinic10", "CINIC-10", "."])
@pytest.mark.parametrize("valid", ["valid", "validation"])
def test_splits_are_merged_in_order(tmp_path: Path, no_hub: None, below: str, valid: str) -> None:
    write_folders(tmp_path / below, ("train", valid, "test"))
    assert_merged(load(tmp_path, None))


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for name, grey in (("b", 2), ("a", 1), ("c", 3)):
        (tmp_path / "train" / "airplane" / f"{name}.png").write_bytes(png_bytes(np.full((32, 32), grey, np.uint8)))
    samples = load(tmp_path, None)
    assert samples.labels[:5].tolist() == [0, 0, 0, 0, 1]
    assert samples.images[1:4, 0, 0, 0].tolist() == [1, 2, 3]  # after 00.png


def test_grey_images_become_rgb(tmp_path: Path) -> None:
    write_folders(tmp_path)
    grey = random_images(1, 1, 32)[0, 0]
    (tmp_path / "train" / "airplane" / "00.png").write_bytes(png_bytes(grey))
    samples = load(tmp_path, None)
    np.testing.assert_array_equal(samples.images[0], np.stack([grey] * 3))


def test_pixels_keep_their_places(tmp_path: Path) -> None:
    write_folders(tmp_path)
    pixels = random_images(1, 3, 32)[0]
    (tmp_path / "train" / "airplane" / "00.png").write_bytes(png_bytes(pixels.transpose(1, 2, 0)))
    np.testing.assert_array_equal(load(tmp_path, None).images[0], pixels)


def test_files_that_are_no_images_are_ignored(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for place in (".", "train", "train/cat"):
        for name in (".DS_Store", "README.md", "imagenet-contributors.csv"):
            (tmp_path / place / name).write_bytes(b"no image")
    assert_merged(load(tmp_path, None))


def test_progress_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cinic10, "LOG_EVERY", 12)
    with caplog.at_level(logging.INFO):
        load(write_folders(tmp_path), None)
    found = re.findall(r"Decoded (\d+) of 30 images", caplog.text)
    assert found == ["12", "24"]


def refusal(tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, None)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize(("split", "name"), [("train", "train"), ("valid", "valid or validation"), ("test", "test")])
def test_a_missing_split_is_named(tmp_path: Path, no_hub: None, split: str, name: str) -> None:
    root = write_folders(tmp_path / "cinic10")
    shutil.rmtree(root / split)
    assert refusal(tmp_path) == f"{root} lacks the folder {name}; fetch the data set again."


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "cinic10")
    (root / "validation").mkdir()
    assert f"{root} holds valid and validation, which are one split; remove one" in refusal(tmp_path)


@pytest.mark.parametrize("split", SPLITS)
def test_a_missing_class_is_named(tmp_path: Path, split: str) -> None:
    folder = write_folders(tmp_path / "cinic10") / split / "deer"
    shutil.rmtree(folder)
    assert refusal(tmp_path) == f"{folder} is missing; fetch the data set again."


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    folder = write_folders(tmp_path / "cinic10") / "valid" / "ship"
    for file in folder.iterdir():
        file.unlink()
    (folder / "README").touch()
    assert refusal(tmp_path) == f"{folder} holds no image; fetch the data set again."


@pytest.mark.parametrize("link", [None, "cat", "../train"], ids=["folder", "link to a class", "link to a split"])
def test_a_folder_in_a_class_is_named(tmp_path: Path, link: str | None) -> None:
    below = write_folders(tmp_path / "cinic10") / "train" / "dog" / "loop"
    if link is None:
        below.mkdir()
        (below / "1.png").write_bytes(png_bytes(colour(0, 5)))
    else:
        below.symlink_to(f"../{link}")
    assert refusal(tmp_path) == (
        f"{below} is a folder, and images must lie directly in their class's; move its images up or remove it."
    )


@pytest.mark.parametrize("target", ["train/cat", "test/dog"])
def test_a_class_that_is_a_link_to_another_is_refused(tmp_path: Path, target: str) -> None:
    root = write_folders(tmp_path / "cinic10")
    shutil.rmtree(root / "train" / "dog")
    (root / "train" / "dog").symlink_to(root / target)
    message = refusal(tmp_path)
    assert message.endswith(" are one folder, by a link; put the images of each class there.")
    assert str(root / "train" / "dog") in message
    assert str(root / target) in message


def test_a_class_may_be_a_link_to_its_images_elsewhere(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "cinic10")
    shutil.move(root / "train" / "dog", tmp_path / "elsewhere")
    (root / "train" / "dog").symlink_to(tmp_path / "elsewhere")
    assert_merged(load(tmp_path, None))


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    file = write_folders(tmp_path / "cinic10") / "train" / "dog" / "lost.png"
    file.symlink_to("nowhere")
    assert refusal(tmp_path).startswith(f"{file} must be a 32x32 PNG image, but ")


@pytest.mark.parametrize("place", ["train/dog", "train"])
def test_an_unreadable_folder_says_so(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, scan = write_folders(tmp_path / "cinic10") / place, os.scandir

    def scandir(path: Any) -> Any:  # the tests may run as root, to whom every folder is open
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    message = refusal(tmp_path)
    assert message == f"{closed} cannot be read (Permission denied); let this user read it, or correct the name."


def test_a_folder_that_cannot_be_looked_into_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, look = write_folders(tmp_path / "cinic10"), Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if root in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return look(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert refusal(tmp_path).startswith(f"{root / 'train' / 'airplane'} cannot be read (Permission denied); let this")


@pytest.mark.parametrize("name", ["lorry", "Truck"])
def test_a_strange_class_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folders(tmp_path / "cinic10") / "test" / "truck"
    folder.rename(folder.with_name(name))
    message = refusal(tmp_path)
    assert message.startswith(f"{folder.with_name(name)} is none of CINIC-10's classes airplane, automobile, bird, ")
    assert message.endswith("; rename or remove the folder.")


def damaged() -> dict[str, tuple[bytes, str]]:
    pixels = random_images(1, 3, 32)[0].transpose(1, 2, 0)
    whole = png_bytes(pixels)
    middle = len(whole) // 2
    return {
        "cut": (whole[:middle], r"it is damaged \(.*\)"),
        "flipped": (whole[:middle] + bytes(64) + whole[middle + 64 :], r"it is damaged \(.*\)"),
        "empty": (b"", r"its content is no readable PNG"),
        "text": (b"not an image", r"its content is no readable PNG"),
        "jpeg": (png_bytes(pixels, "JPEG"), r"its content is no readable PNG"),
        "small": (png_bytes(pixels[:31]), r"it has 32x31 pixels"),
        "large": (png_bytes(np.zeros((64, 64, 3), np.uint8)), r"it has 64x64 pixels"),
        "deep": (png_bytes(np.full((32, 32), 1000, np.uint16)), r"it has 16 bits a channel"),
        "deep colours": (png_of_16_bits(2, 3), r"it has 16 bits a channel"),
        "deep colours, opacity": (png_of_16_bits(6, 4), r"it has 16 bits a channel"),
    }


@pytest.mark.parametrize("kind", damaged())
def test_wrong_images_are_named(tmp_path: Path, kind: str) -> None:
    file = write_folders(tmp_path / "cinic10") / "valid" / "frog" / "16.png"
    content, reason = damaged()[kind]
    file.write_bytes(content)
    pattern = rf"{re.escape(str(file))} must be a 32x32 PNG image, but {reason}; fetch it again or remove it\."
    assert re.fullmatch(pattern, refusal(tmp_path))


def test_a_jpeg_by_name_is_not_passed_over(tmp_path: Path) -> None:
    file = write_folders(tmp_path / "cinic10") / "train" / "dog" / "new.jpg"
    file.write_bytes(png_bytes(colour(0, 0), "JPEG"))
    assert refusal(tmp_path).startswith(f"{file} must be a 32x32 PNG image")


def test_an_image_too_large_for_pillow_is_refused_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"it is damaged \(.*decompression bomb"):
        png.decode(png_bytes(colour(0, 0)), 3, 32)


def test_nothing_at_all_names_every_place_and_the_way_out(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "train").mkdir()  # LEAF's folders have these names, too
    (tmp_path / "cinic10").mkdir()
    with pytest.raises(ConfigError, match="leave data_dir unset to read the hub") as caught:
        data.load("cinic10", str(tmp_path))
    for place in ("cinic10", "CINIC-10", "flwrlabs/cinic10"):
        assert str(tmp_path / place) in str(caught.value)


# Parquet, from local files and from the hub.


def write_tables(root: Path, tables: datasets.DatasetDict) -> Path:
    folder = root / "flwrlabs" / "cinic10" / "data"
    folder.mkdir(parents=True)
    for split, table in tables.items():
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("valid", ["validation", "valid"])
def test_parquet_in_the_hubs_layout(tmp_path: Path, no_hub: None, valid: str) -> None:
    write_tables(tmp_path, hub_tables("test", valid, "train"))
    assert_merged(load(tmp_path, None))


def test_parquet_need_not_name_its_classes(tmp_path: Path) -> None:
    for split in SPLITS:
        file = tmp_path / "flwrlabs" / "cinic10" / f"{split}.parquet"
        write_parquet(file, "image", random_images(2, 3, 32), label=[0, 9])
    assert load(tmp_path, None).labels.tolist() == [0, 9] * 3


def test_a_missing_parquet_split_is_named(tmp_path: Path) -> None:
    write_tables(tmp_path, hub_tables("train", "test"))
    assert f"{tmp_path / 'flwrlabs' / 'cinic10'} lacks the val*.parquet files" in refusal(tmp_path)


def test_parquet_with_classes_in_another_order_is_refused(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, hub_tables("train", "validation", "test", names=CLASSES[::-1]))
    message = refusal(tmp_path)
    assert f"{folder / 'train-00000-of-00001.parquet'} numbers its classes truck, ship, " in message
    assert "and the data set needs airplane, automobile, " in message


def test_wrong_parquet_is_named(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, hub_tables("train", "validation", "test"))
    file = folder / "validation-00000-of-00001.parquet"
    write_parquet(file, "image", random_images(2, 3, 32), label=[0, 10])
    assert f"{file} holds the label 10, outside 0..9" in refusal(tmp_path)
    write_parquet(file, "image", random_images(2, 3, 28), label=[0, 1])
    assert f"{file} holds no 32x32 PNG image in column 'image', row 0" in refusal(tmp_path)
    write_parquet(file, "img", random_images(2, 3, 32), label=[0, 1])
    assert f"{file} has no column 'image'" in refusal(tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file} is not a readable Parquet file" in refusal(tmp_path)


@pytest.mark.parametrize("valid", ["validation", "valid", "val"])
def test_the_hub_gives_what_the_folders_give(valid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(hub: str) -> datasets.DatasetDict:
        asked.append(hub)
        return hub_tables("test", "train", valid)

    monkeypatch.setattr("datasets.load_dataset", answer)
    assert_merged(load(None, SOURCES["cinic10"].hub))
    assert asked == ["flwrlabs/cinic10"]


def test_a_hub_with_classes_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda hub: hub_tables("train", names=CLASSES[::-1]))
    with pytest.raises(ConfigError, match=r"someone/cinic10 \(train\) numbers its classes truck, ship, .*label"):
        load(None, "someone/cinic10")


def test_offline_the_hubs_name_and_data_dir_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(hub: str) -> None:
        raise ConnectionError(f"Couldn't reach {hub!r} on the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ConfigError, match=r"flwrlabs/cinic10 could not be read .* set data_dir"):
        data.load("cinic10")
