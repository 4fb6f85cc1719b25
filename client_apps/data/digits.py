"""Digits: 1,797 8x8 images that come with scikit-learn, for runs that need no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from client_apps.data.samples import Samples


def load(data_dir: Path | None, hub: str | None) -> Samples:
    """Read `sklearn.datasets.load_digits`, its 0..16 grey levels stretched to 0..255.

    Both arguments are those of every loader and unused: the data is part of the installed library.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Samples(images, labels.astype(np.int64), num_classes=10)
