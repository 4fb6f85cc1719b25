"""Loaders: known contents of the real files, every accepted layout, and clear words where files are wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from client_apps import data
from client_apps.data import SOURCES, Samples
from client_apps.data.cifar import CIFAR10, CIFAR100, Variant
from client_apps.data.cifar import load as load_cifar
from client_apps.data.femnist import load as load_femnist
from client_apps.errors import ConfigError


def random_images(count: int, channels: int, side: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, channels, side, side), dtype=np.uint8)


def write_parquet(file: Path, column: str, images: np.ndarray, **columns: Any) -> None:
    """Write images as the hub does: PNG bytes and a path in a struct."""
    cells = []
    for image in images:
        stream = io.BytesIO()
        Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(stream, "PNG")
        cells.append({"bytes": stream.getvalue(), "path": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({column: pa.array(cells, kind), **columns}), file)


def write_leaf(file: Path, users: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"users": list(users), "num_samples": [], "user_data": users}))


def assert_valid(samples: Samples, name: str) -> None:
    source, count = SOURCES[name], len(samples.labels)
    assert samples.images.dtype == np.uint8
    assert samples.images.flags.c_contiguous
    assert samples.images.shape == (count, source.channels, source.side, source.side)
    assert samples.labels.dtype == np.int64
    assert samples.num_classes == source.num_classes
    assert set(np.unique(samples.labels)) <= set(range(source.num_classes))


def test_digits_are_all_there_and_use_the_whole_range() -> None:
    samples = data.load("digits")
    assert_valid(samples, "digits")
    assert len(samples.labels) == 1797  # scikit-learn's documentation
    assert (samples.images.min(), samples.images.max()) == (0, 255)


def test_cifar10_holds_the_official_images_in_official_order(data_dir: Path) -> None:
    samples = data.load("cifar10", str(data_dir))
    assert_valid(samples, "cifar10")
    assert len(samples.labels) == 21_000  # data_batch_1, data_batch_2, the first 1,000 of test_batch
    # The first labels of data_batch_1 (frog, truck, truck, deer, ...) and of test_batch (cat, ship, ...).
    assert samples.labels[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    assert samples.labels[20_000:20_008].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
    # The first pixels of the frog: red 59, 43, 50, then green 62 and blue 63 of the first.
    assert samples.images[0, 0, 0, :3].tolist() == [59, 43, 50]
    assert samples.images[0, :, 0, 0].tolist() == [59, 62, 63]


def test_femnist_holds_every_writer(data_dir: Path) -> None:
    samples = data.load("femnist", str(data_dir))
    assert_valid(samples, "femnist")
    assert samples.owners is not None
    writers, counts = np.unique(samples.owners, return_counts=True)
    assert (len(writers), len(samples.labels)) == (100, 15_548)  # 13,950 train + 1,598 test
    assert counts.min() >= 5  # at least 4 train images and 1 test image each
    assert (np.sort(samples.owners) == samples.owners).all()
    assert samples.images[:, 0, 0, 0].mean() > 250  # paper is 1 in LEAF's polarity


def test_a_data_set_is_decoded_once_per_process(data_dir: Path) -> None:
    assert data.load("femnist", str(data_dir)) is data.load("femnist", str(data_dir))


@pytest.mark.parametrize("folder", ["uoft-cs/cifar100/cifar100", "cifar100/cifar100", "cifar100"])
def test_cifar100_parquet_gives_fine_labels_train_first(tmp_path: Path, folder: str) -> None:
    images = random_images(5, 3, 32)
    write_parquet(
        tmp_path / folder / "test-00000-of-00001.parquet", "img", images[3:], fine_label=[99, 0], coarse_label=[1, 2]
    )
    write_parquet(
        tmp_path / folder / "train-00000-of-00001.parquet",
        "img",
        images[:3],
        fine_label=[5, 6, 7],
        coarse_label=[1, 2, 3],
    )
    samples = load_cifar(CIFAR100, tmp_path, None)
    assert_valid(samples, "cifar100")
    np.testing.assert_array_equal(samples.images, images)
    assert samples.labels.tolist() == [5, 6, 7, 99, 0]


@pytest.mark.parametrize(
    ("variant", "files"),
    [
        (CIFAR10, ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"]),
        (CIFAR100, ["train.bin", "test.bin"]),
    ],
    ids=["cifar10", "cifar100"],
)
def test_official_binary_files(tmp_path: Path, variant: Variant, files: list[str]) -> None:
    folder = tmp_path / variant.binary
    folder.mkdir()
    images = random_images(2 * len(files), 3, 32)
    labels = np.arange(len(images), dtype=np.uint8)
    for number, name in enumerate(files):
        rows = slice(2 * number, 2 * number + 2)
        coarse = np.full((2, variant.label_bytes - 1), 200, np.uint8)  # CIFAR-100 has a coarse label first
        record = np.concatenate([coarse, labels[rows, None], images[rows].reshape(2, -1)], axis=1)
        record.tofile(folder / name)
    samples = load_cifar(variant, tmp_path, None)
    np.testing.assert_array_equal(samples.images, images)
    assert samples.images.flags.c_contiguous
    assert samples.labels.tolist() == labels.tolist()


def test_truncated_binary_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / CIFAR10.binary / "data_batch_1.bin"
    file.parent.mkdir()
    file.write_bytes(bytes(3073 + 100))
    with pytest.raises(ConfigError, match=r"data_batch_1.bin is truncated: 3173 bytes"):
        load_cifar(CIFAR10, tmp_path, None)
    file.write_bytes(b"\x0b" + bytes(3072))
    with pytest.raises(ConfigError, match=r"data_batch_1.bin holds the label 11, outside 0..9"):
        load_cifar(CIFAR10, tmp_path, None)


def test_damaged_parquet_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "plain_text" / "train-0.parquet"
    images = random_images(3, 3, 32)
    write_parquet(file, "img", images, label=[0, 1, 2])
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"train-0.parquet is not a readable Parquet file"):
        load_cifar(CIFAR10, tmp_path, None)
    write_parquet(file, "img", images, fine_label=[0, 1, 2])
    with pytest.raises(ConfigError, match=r"train-0.parquet has no column 'label'"):
        load_cifar(CIFAR10, tmp_path, None)
    write_parquet(file, "img", images, label=[0, 1, 10])
    with pytest.raises(ConfigError, match=r"train-0.parquet holds the label 10, outside 0..9"):
        load_cifar(CIFAR10, tmp_path, None)
    write_parquet(file, "img", images, label=[0, None, 1])
    with pytest.raises(ConfigError, match=r"an integer in every row of column 'label'"):
        load_cifar(CIFAR10, tmp_path, None)
    write_parquet(file, "img", random_images(3, 3, 28), label=[0, 1, 2])
    with pytest.raises(ConfigError, match=r"train-0.parquet holds no 32x32 PNG image in column 'img', row 0"):
        load_cifar(CIFAR10, tmp_path, None)


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "missing"])
def test_damaged_images_are_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "plain_text" / "train-0.parquet"
    write_parquet(file, "img", random_images(2, 3, 32), label=[0, 1])
    table = pq.ParquetFile(file).read()
    cells = table["img"].to_pylist()
    png = cells[1]["bytes"]
    middle = len(png) // 2
    cells[1]["bytes"] = {
        "cut": png[:middle],
        "flipped": png[:middle] + bytes(64) + png[middle + 64 :],
        "text": b"not an image",
        "missing": None,
    }[damage]
    pq.write_table(table.set_column(0, "img", pa.array(cells, table.schema.field("img").type)), file)
    with pytest.raises(ConfigError, match=r"train-0.parquet holds no 32x32 PNG image in column 'img', row 1"):
        load_cifar(CIFAR10, tmp_path, None)


@pytest.mark.parametrize("variant", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_pickle_versions_are_refused(tmp_path: Path, variant: Variant) -> None:
    (tmp_path / variant.pickle).mkdir()
    with pytest.raises(ConfigError, match=f"pickle files, which are never loaded; put .*{variant.binary}.*Parquet"):
        load_cifar(variant, tmp_path, None)


def leaf_user(*labels: int, value: float = 0.5) -> dict[str, Any]:
    return {"x": [[value] * 784 for _ in labels], "y": list(labels)}


@pytest.mark.parametrize("below", ["femnist", "."])
def test_leaf_parts_are_merged_by_writer(tmp_path: Path, below: str) -> None:
    root = tmp_path / below
    write_leaf(root / "train" / "a.json", {"w2": leaf_user(1, 2), "w1": leaf_user(3)})
    write_leaf(root / "train" / "b.json", {"w3": leaf_user(4, value=0.2)})
    write_leaf(root / "test" / "a.json", {"w1": leaf_user(61, value=1), "w2": leaf_user(0)})
    samples = load_femnist(tmp_path, None)
    assert_valid(samples, "femnist")
    assert samples.owners is not None
    assert samples.owners.tolist() == ["w1", "w1", "w2", "w2", "w2", "w3"]
    assert samples.labels.tolist() == [3, 61, 1, 2, 0, 4]
    assert samples.images[:, 0, 5, 5].tolist() == [128, 255, 128, 128, 128, 51]  # round(255 x)


def test_femnist_parquet_in_the_hubs_layout(tmp_path: Path) -> None:
    images = random_images(4, 1, 28)
    write_parquet(
        tmp_path / "flwrlabs" / "femnist" / "data" / "train-0.parquet",
        "image",
        images,
        writer_id=["b", "a", "b", "a"],
        hsf_id=[0, 0, 0, 0],
        character=[1, 2, 3, 61],
    )
    samples = load_femnist(tmp_path, None)
    assert samples.owners is not None
    assert samples.owners.tolist() == ["a", "a", "b", "b"]
    assert samples.labels.tolist() == [2, 61, 1, 3]
    np.testing.assert_array_equal(samples.images, images[[1, 3, 0, 2]])


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"x": [[0.5] * 784]}, r"needs the keys 'x' and 'y'"),
        ({"x": [[0.5] * 783], "y": [1]}, r"each of 784 numbers"),
        ({"x": [[0.5] * 784, [0.5] * 3], "y": [1, 2]}, r"784 numbers"),
        ({"x": [[0.5] * 784], "y": [1, 2]}, r"has 1 images but labels of shape \(2,\)"),
        ({"x": [[0.5] * 784], "y": [62]}, r"labels must be integers in 0..61"),
        ({"x": [[0.5] * 784], "y": [-1]}, r"labels must be integers in 0..61"),
        ({"x": [[0.5] * 784], "y": [0.5]}, r"labels must be integers in 0..61"),
        ({"x": [[255] * 784], "y": [1]}, r"pixels must lie in \[0, 1\]"),
        ({"x": [[float("nan")] * 784], "y": [1]}, r"pixels must lie in \[0, 1\]"),
        ([], r"needs the keys 'x' and 'y'"),
    ],
)
def test_wrong_leaf_files_name_file_and_writer(tmp_path: Path, user: Any, message: str) -> None:
    write_leaf(tmp_path / "train" / "part_3.json", {"f01": leaf_user(1), "f02": user})
    with pytest.raises(ConfigError, match=rf"part_3.json, writer f02: .*{message}"):
        load_femnist(tmp_path, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"user_data": 3}', "\xff"])
def test_files_that_are_not_leaf_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"part.json .*'user_data'"):
        load_femnist(tmp_path, None)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("cifar10", ["uoft-cs/cifar10/plain_text", "plain_text", "cifar-10-batches-bin"]),
        ("cifar100", ["uoft-cs/cifar100/cifar100", "cifar-100-binary"]),
        ("femnist", ["femnist", "flwrlabs/femnist"]),
    ],
)
def test_missing_data_names_the_folders_and_the_way_out(tmp_path: Path, name: str, places: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave data_dir unset") as caught:
        data.load(name, str(tmp_path))
    for place in places:
        assert str(tmp_path / place) in str(caught.value)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "femnist"])
def test_offline_the_hubs_name_and_data_dir_are_mentioned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(hub: str) -> None:
        raise ConnectionError(f"Couldn't reach {hub!r} on the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ConfigError, match=f"{SOURCES[name].hub} could not be read .* set data_dir"):
        data.load(name)


def test_the_hub_gives_what_local_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A local folder stands in for the hub: datasets loads it by the same call.
    images = random_images(3, 3, 32)
    folder = tmp_path / "uoft-cs" / "cifar10" / "plain_text"
    write_parquet(folder / "train-00000-of-00001.parquet", "img", images[:2], label=[3, 4])
    write_parquet(folder / "test-00000-of-00001.parquet", "img", images[2:], label=[5])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    local = load_cifar(CIFAR10, tmp_path, None)
    hub = load_cifar(CIFAR10, None, str(tmp_path / "uoft-cs" / "cifar10"))
    np.testing.assert_array_equal(hub.images, local.images)
    assert hub.labels.tolist() == local.labels.tolist() == [3, 4, 5]
