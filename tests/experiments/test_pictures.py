"""Examples of segmentation: on disk, at the end of a run, and drawn by the report."""

import json
import logging
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from safetensors.numpy import save_file

from client_apps.tasks.base import Example, Illustrated
from client_apps.tasks.classification import ClassificationTask
from experiments import server_app
from experiments.config import compose
from experiments.examples import FILE, load_examples, save_examples
from experiments.pictures import figure_of, gather
from experiments.report import report
from experiments.run import run
from experiments.runs import find_runs, group_runs

from .test_report import named, quiet, segmentation, write_run
from .test_tracking import tracker


def example(subject=0, plane=7):
    """A slice of 20x16 pixels: nested squares, of which the model finds all but a row of the innermost."""
    truth = np.zeros((3, 20, 16), bool)
    for index, inset in enumerate((0, 1, 2)):
        truth[index, 4 + inset : 12 - inset, 5 + inset : 13 - inset] = True
    prediction = truth.copy()
    prediction[2, 6] = False
    image = np.zeros((20, 16), np.float32)
    image[2:18, 2:14] = 0.5 + np.random.default_rng(subject).random((16, 12))
    return Example(f"FeTS2022_{subject:05}", 3 + subject, "flair", plane, image, truth, prediction)


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def test_examples_come_back_as_they_were(tmp_path):
    examples = [example(0), example(1)]
    with tracker(tmp_path) as there:
        there.save_examples(examples)
    back = load_examples(tmp_path / FILE)
    assert all(map(same, back, examples))
    assert back[0].prediction.dtype == bool
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / FILE).stat().st_mode == (tmp_path / "config.yaml").stat().st_mode


def test_no_examples_are_a_file_without_any(tmp_path):
    save_examples(tmp_path / FILE, [])
    assert load_examples(tmp_path / FILE) == []


FACTS = {"subject": "s", "client": 0, "modality": "flair", "plane": 0}


@pytest.mark.parametrize(
    ("arrays", "metadata"),
    [
        ({"0.image": np.zeros((2, 2), np.float32)}, None),
        ({"0.image": np.zeros((2, 2), np.float32)}, {"examples": "[{"}),
        ({"0.image": np.zeros((2, 2), np.float32)}, {"examples": "[{}]"}),
        ({"0.image": np.zeros((2, 2), np.float32)}, {"examples": json.dumps([FACTS])}),
        (
            {
                "0.image": np.zeros((2, 2), np.float32),
                "0.truth": np.zeros((3, 3, 3), np.uint8),
                "0.prediction": np.zeros((3, 2, 2), np.uint8),
            },
            {"examples": json.dumps([FACTS])},
        ),
    ],
)
def test_another_file_is_refused(tmp_path, arrays, metadata):
    save_file(arrays, tmp_path / FILE, metadata=metadata)
    with pytest.raises(ValueError, match="holds no examples"):
        load_examples(tmp_path / FILE)


def test_half_a_file_is_refused(tmp_path):
    save_examples(tmp_path / FILE, [example()])
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-100])
    with pytest.raises(ValueError, match="holds no examples"):
        load_examples(tmp_path / FILE)


class Task:
    """A linear model whose examples say what its first weight is."""

    def new_model(self):
        return torch.nn.Linear(2, 1, bias=False)

    def examples(self, model, count):
        plane = round(float(model.weight.detach()[0, 0]))
        return [example(subject, plane) for subject in range(count)]


def weights(value):
    return server_app.ndarrays_to_parameters([np.full((1, 2), value, np.float32)])


def test_a_run_saves_examples_of_its_last_model(tmp_path):
    assert isinstance(Task(), Illustrated)
    with tracker(tmp_path) as there:
        server_app._illustrate(Task(), weights(5), 2, there)
    assert [(e.subject, e.plane) for e in load_examples(tmp_path / FILE)] == [
        ("FeTS2022_00000", 5), ("FeTS2022_00001", 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "count"), [((), 4), (("tracking.examples=0",), 0), (("evaluation=federated",), 0)]
)
def test_examples_of_a_whole_run(tmp_path, monkeypatch, overrides, count):
    made = lambda self, model, count: [example(subject) for subject in range(count)]  # noqa: E731
    monkeypatch.setattr(ClassificationTask, "examples", made, raising=False)
    small = ("num_clients=4", "clients_per_round=2", "num_rounds=1", "tracking.progress=false")
    run(compose([*small, *overrides, "simulation=serial", "tracking.tensorboard=false", f"output_dir={tmp_path}"]))
    assert (tmp_path / FILE).exists() == (count > 0)
    assert not count or len(load_examples(tmp_path / FILE)) == count
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["straightness"] == 1  # one step


def test_a_failure_to_make_them_is_logged_and_nothing_else(tmp_path, caplog):
    class Broken(Task):
        def examples(self, model, count):
            raise RuntimeError("out of memory")

    with caplog.at_level(logging.WARNING), tracker(tmp_path) as there:
        server_app._illustrate(Broken(), weights(5), 2, there)
    assert "its examples cannot be made: RuntimeError: out of memory" in caplog.text
    assert not (tmp_path / FILE).exists()
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"


def test_a_task_without_examples_has_none(tmp_path):
    with tracker(tmp_path) as there:
        server_app._illustrate(object(), weights(5), 2, there)
    assert not (tmp_path / FILE).exists()


@pytest.fixture
def runs(tmp_path):
    """Two strategies with two seeds; only seed 1 has examples of both."""
    for name, seed, dice, count in (("a", 0, 0.8, 3), ("a", 1, 0.8, 3), ("b", 0, 0.5, 0), ("b", 1, 0.5, 2)):
        folder = tmp_path / name / str(seed)
        write_run(folder, [None] * 4, segmentation(seed, strategy=named(name)), dice=[0.0, 0.1, 0.2, dice])
        if count:
            save_examples(folder / FILE, [example(subject) for subject in range(count)])
    return tmp_path


def galleries(folder):
    left_out = []
    found = [gather(group, left_out) for group in group_runs(find_runs([folder])[0], None, left_out)]
    return found, left_out


def texts(figure):
    """Return every text of a figure."""
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(Text)]


def test_one_seed_is_shown_of_all_strategies(runs):
    (gallery,), left_out = galleries(runs)
    assert (gallery.seed, list(gallery.predictions), left_out) == (1, ["a", "b"], [])
    shown = texts(figure_of([gallery]))
    assert shown.count("no example") == 1  # the third subject, which b lacks
    assert "FeTS2022_00002\ninstitution 5, plane 7" in shown
    # the innermost square has 16 pixels, of which 12 were found: 2 * 12 / (16 + 12)
    dice = 2 * 12 / 28
    assert shown.count(f"Dice {100 * (2 + dice) / 3:.1f}\nWT 100  TC 100  ET {100 * dice:.0f}") == 5


def test_the_report_draws_and_links_them(runs):
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    assert "](segmentation.png)" in text
    png = (runs / "segmentation.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert 600 < width < 2200
    assert 900 < height < 2200


def test_without_examples_there_is_no_picture(tmp_path):
    write_run(tmp_path / "a", [None] * 4, segmentation(), dice=[0.0, 0.1, 0.2, 0.3])
    assert "segmentation.png" not in report([tmp_path], console=quiet()).read_text(encoding="utf-8")
    assert not (tmp_path / "segmentation.png").exists()


def test_a_damaged_file_is_named_and_the_others_are_drawn(runs):
    (runs / "a/1" / FILE).write_bytes(b"no")
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    assert f"{runs / 'a/1' / FILE} holds no examples" in text
    (gallery,), _ = galleries(runs)
    assert list(gallery.predictions) == ["b"]


def test_of_many_strategies_the_best_are_shown(tmp_path):
    for number in range(9):
        folder = tmp_path / str(number)
        write_run(
            folder, [None] * 4, segmentation(strategy=named(f"s{number}")), dice=[0.0, 0.1, 0.2, 0.1 * number + 0.05]
        )
        save_examples(folder / FILE, [example()])
    (gallery,), _ = galleries(tmp_path)
    assert list(gallery.predictions) == [f"s{number}" for number in (8, 7, 6, 5, 4, 3)]
    assert any("the best 6 of 9 strategies" in text for text in texts(figure_of([gallery])))


@pytest.mark.parametrize("change", ["nothing found", "no tumour", "all tumour", "no image"])
def test_extreme_slices_can_be_drawn(runs, change):
    (gallery,), _ = galleries(runs)
    there = example()
    none, full = np.zeros_like(there.truth), np.ones_like(there.truth)
    changed = {
        "nothing found": {"prediction": none},
        "no tumour": {"truth": none, "prediction": none},
        "all tumour": {"truth": full, "prediction": full},
        "no image": {"image": np.zeros_like(there.image), "truth": none, "prediction": none},
    }[change]
    key = next(iter(gallery.examples))
    altered = replace(there, **changed)
    shown = texts(figure_of([replace(gallery, examples={key: altered}, predictions={"a": {key: altered}})]))
    assert ("Dice 0.0\nWT 0  TC 0  ET 0" in shown) == (change == "nothing found")


def arrays(image):
    masks = np.zeros((3, *image.shape), np.uint8)
    return {"0.image": image, "0.truth": masks, "0.prediction": masks}


PLAIN = np.ones((4, 5), np.float32)


@pytest.mark.parametrize(
    ("image", "facts"),
    [
        (np.zeros((0, 5), np.float32), json.dumps([FACTS])),
        (np.zeros((0, 0), np.float32), json.dumps([FACTS])),
        (np.full((4, 5), 3e38, np.float32), json.dumps([FACTS])),
        (np.full((4, 5), np.nan, np.float32), json.dumps([FACTS])),
        (np.float32(1), json.dumps([FACTS])),
        (PLAIN, json.dumps([FACTS]).replace('"client": 0', '"client": 1e400')),
        (PLAIN, json.dumps([FACTS]).replace('"client": 0', '"client": NaN')),
        (PLAIN, "[" * 100_000),
        (PLAIN, "7"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_named_and_the_others_are(runs, image, facts):
    save_file(arrays(np.asarray(image)), runs / "a/1" / FILE, metadata={"examples": facts})
    with pytest.raises(ValueError, match="holds no examples"):
        load_examples(runs / "a/1" / FILE)
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    assert f"{runs / 'a/1' / FILE} holds no examples" in text
    assert "](segmentation.png)" in text


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1)])
@pytest.mark.parametrize("value", [0.0, 1.0, 9e29])
def test_small_and_extreme_images_can_be_drawn(runs, shape, value):
    image = np.full(shape, value, np.float32)
    image.flat[0] = -value
    save_file(arrays(image), runs / "a/1" / FILE, metadata={"examples": json.dumps([FACTS])})
    assert report([runs], console=quiet())
    assert (runs / "segmentation.png").is_file()


def test_a_dollar_is_no_formula(runs):
    name = r"$\frac{a$ b $x^"
    changed = replace(example(), subject=name, modality=name)
    for seed in (0, 1):
        folder = runs / "c" / str(seed)
        settings = segmentation(seed, strategy=named(name), dataset={"name": name, "partition": {"kind": name}})
        write_run(folder, [None] * 4, settings, dice=[0.0, 0.1, 0.2, 0.3])
        save_examples(folder / FILE, [changed])
    assert report([runs], console=quiet())
    assert {"curves.png", "segmentation.png", "report.csv"} <= {path.name for path in runs.iterdir()}
    found, _ = galleries(runs)
    assert f"{name}\ninstitution 3, plane 7" in texts(figure_of(found))
