"""CLAIR's pictures: they are PNGs, written in one step, of whatever a run may give them."""

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from experiments import clair_pictures as pictures


def distances(count, bad=1):
    """Return distances of pairs of which the last `bad` clients are far from all others."""
    found = np.zeros((count, count))
    found[count - bad :] = found[:, count - bad :] = 2.0
    np.fill_diagonal(found, 0)
    return found


def size(path):
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        return image.size


@pytest.mark.parametrize(("count", "bad"), [(2, 1), (2, 2), (5, 0), (5, 5), (20, 4), (130, 30)])
def test_pairs_of_any_number_of_clients(tmp_path, count, bad):
    members = np.arange(count) < count - bad
    pictures.draw_pairs(distances(count, bad), members, 0.5, [f"c{k}" for k in range(count)], tmp_path / "pairs.png")
    width, height = size(tmp_path / "pairs.png")
    assert 600 < width < 1500
    assert 600 < height < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.png"]


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e12, np.nan])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_extreme_distances(tmp_path, value, threshold):
    pictures.draw_pairs(np.full((3, 3), value), np.ones(3, bool), threshold, ["a", "b", "c"], tmp_path / "pairs.png")
    assert size(tmp_path / "pairs.png")


def test_who_was_voted_out_is_framed_and_named():
    labels = [f"$c_{k}$" for k in range(6)]
    figure = pictures._pairs_figure(distances(6, 2), np.arange(6) < 4, 0.5, labels)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels() if t.get_weight() == "bold"] == ["$c_4$", "$c_5$"]
    assert len(axes.patches) == 4  # a row and a column each
    shown = [text.get_text() for text in figure.findobj(Text)]
    assert "voted out: 2 of 6" in shown
    assert "τ" in shown
    image = axes.images[0].get_array()
    assert np.ma.getmaskarray(image).diagonal().all()  # a client is in no pair with itself
    assert image[0, 5] == image[5, 0] == 2


def test_what_does_not_fit_together_is_refused(tmp_path):
    with pytest.raises(ValueError, match="do not fit"):
        pictures.draw_pairs(np.zeros((3, 3)), np.ones(2, bool), 1.0, ["a", "b", "c"], tmp_path / "pairs.png")
    assert not list(tmp_path.iterdir())


def test_pairs_become_a_symmetric_matrix():
    found = pictures.square(3, [(0, 1), (1, 2)], [5.0, 7.0])
    np.testing.assert_array_equal(found, [[0, 5, np.nan], [5, 0, 7], [np.nan, 7, 0]])
    assert pictures.square(2, np.zeros((0, 2), int), []).tolist()[0][0] == 0


def test_the_slope_of_a_power_law_is_found(tmp_path):
    clients = np.array([5, 10, 20, 40])
    lines = {
        "one": (3 * clients**-0.5, np.full(4, 0.01)),
        "other": (np.append(2 / clients[:3], np.nan), np.full(4, np.nan)),
        "none": (np.zeros(4), np.zeros(4)),
    }
    shown = [t.get_text() for t in pictures._subspace_figure(clients, lines).findobj(Text)]
    assert "one: fitted slope −0.50" in shown
    assert "other: fitted slope −1.00" in shown
    pictures.draw_subspace_error(clients, lines, tmp_path / "s.png")
    pictures.draw_subspace_error([5], {"one": ([1.0], [np.nan])}, tmp_path / "one.png")
    assert size(tmp_path / "s.png")
    assert size(tmp_path / "one.png")


def test_gain_and_cost_with_and_without_members(tmp_path):
    nothing = (np.array([np.nan, 0.0]), np.array([np.nan, 0.0]), np.zeros(2))
    some = (np.array([0.1, 3.0]), np.array([1.0, 2.0]), np.array([0.0, 1.0]))
    curves = {"a, estimated": some, "a, true": nothing, "b, estimated": nothing, "b, true": nothing}
    figure = pictures._gain_cost_figure(np.array([0.0, 0.2]), curves)
    rings = [line for line in figure.axes[0].lines if line.get_fillstyle() == "none"]
    np.testing.assert_array_equal(rings[0].get_xydata(), [[3.0, 2.0]])  # the one that warned
    pictures.draw_gain_cost([0.0, 0.2], curves, tmp_path / "g.png")
    assert size(tmp_path / "g.png")


@pytest.mark.parametrize("log", ["", "y", "x", "xy"])
def test_lines(tmp_path, log):
    lines = {f"line {i}": (np.array([1.0, 2.0 + i, np.nan]), np.array([0.1, np.nan, np.nan])) for i in range(9)}
    pictures.draw_lines([1, 2, 3], lines, tmp_path / "l.png", title="$", xlabel="x", ylabel="y", log=log)
    assert size(tmp_path / "l.png")


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "pairs.png"
    path.write_bytes(b"old")

    def fails(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(pictures.Figure, "savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        pictures.draw_pairs(distances(3), np.ones(3, bool), 1.0, ["a", "b", "c"], path)
    assert path.read_bytes() == b"old"
