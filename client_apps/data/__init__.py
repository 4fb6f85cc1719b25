"""The data sets by name: their constants, and a loader that decodes each once per process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from client_apps.data import cifar, cinic10, digits, femnist
from client_apps.data.samples import Samples

log = logging.getLogger(__name__)

__all__ = ["SOURCES", "Samples", "Source", "load"]


@dataclass(frozen=True)
class Source:
    """What is known of a data set before it is read.

    Parameters
    ----------
    read : Callable[[Path | None, str | None], Samples]
        Takes the data folder (None: the hub) and the hub's name for the data set.
    channels, side, num_classes : int
        Images are (channels, side, side) pixels.
    mean, std : tuple[float, ...]
        Of each channel, for pixels in [0, 1].
    hub : str or None
        The hub's name; None where nothing has to be fetched.
    """

    read: Callable[[Path | None, str | None], Samples]
    channels: int
    side: int
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    hub: str | None = None


# The CIFAR constants are the channel statistics of the official train sets, FEMNIST's those of 100 of its writers
# in LEAF's polarity (paper 1, ink 0): left as stored, inputs of mean .96 hardly train. Digits are used in [0, 1].
# CINIC-10's are those its authors give (github.com/BayesWatch/cinic-10).
SOURCES = {
    "digits": Source(digits.load, channels=1, side=8, num_classes=10),
    "cifar10": Source(
        partial(cifar.load, cifar.CIFAR10),
        channels=3,
        side=32,
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        hub="uoft-cs/cifar10",
    ),
    "cifar100": Source(
        partial(cifar.load, cifar.CIFAR100),
        channels=3,
        side=32,
        num_classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        hub="uoft-cs/cifar100",
    ),
    "femnist": Source(
        femnist.load,
        channels=1,
        side=28,
        num_classes=62,
        mean=(0.9613,),
        std=(0.1651,),
        hub="flwrlabs/femnist",
    ),
    "cinic10": Source(
        cinic10.load,
        channels=cinic10.CHANNELS,
        side=cinic10.SIDE,
        num_classes=len(cinic10.CLASSES),
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
        hub="flwrlabs/cinic10",
    ),
}


@lru_cache(maxsize=2)
def load(name: str, data_dir: str | None = None, hub: str | None = None) -> Samples:
    """Read a whole data set, official train and test parts merged in that order.

    The two most recent are kept, so a worker decodes its data once, not once per client or round.

    Parameters
    ----------
    name : str
        A key of SOURCES.
    data_dir : str or None
        Folder with local files in the data set's own layout; None reads the hub.
    hub : str or None
        Another name for the data set on the hub.

    Raises
    ------
    ConfigError
        The data is missing or damaged.
    """
    source = SOURCES[name]
    samples = source.read(Path(data_dir) if data_dir else None, hub or source.hub)
    log.info("Loaded %d images of %s", len(samples.labels), name)
    return samples
