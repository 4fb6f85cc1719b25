"""Dealing the samples of a data set to clients, through flwr-datasets' partitioners."""

from __future__ import annotations

import contextlib
import heapq
import io
import logging
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_apps.config import PartitionConfig, integer, read
from client_apps.errors import ConfigError

log = logging.getLogger(__name__)

Indices = NDArray[np.int64]


def partition(
    labels: NDArray[np.int64],
    owners: NDArray[np.str_] | None,
    *,
    num_clients: int,
    seed: int,
    **options: Any,
) -> list[Indices]:
    """Give every client its samples.

    Parameters
    ----------
    labels : ndarray of int64, shape (n,)
        Class of every sample.
    owners : ndarray of str, shape (n,), or None
        Natural client of every sample; needed by kind "natural" only.
    num_clients : int
        Number of clients to deal to.
    seed : int
        The same seed gives the same partition.
    **options
        The fields of `client_apps.config.PartitionConfig`; `kind` is required:

        - "iid": equal sizes, up to one sample.
        - "dirichlet": every class is divided in proportions drawn from Dirichlet(alpha); clients left
          with fewer than `min_samples` are topped up with single samples from the largest clients.
        - "shards": `shards_per_client` runs of label-sorted samples each; the few samples over go one by
          one to the smallest clients that already hold that label.
        - "natural": the first `num_clients` owners in sorted order, one each.

    Returns
    -------
    list of ndarray of int64
        Sorted sample indices of each client: disjoint, not empty, and together all samples (for
        "natural", all samples of the owners taken).

    Raises
    ------
    ConfigError
        An option is unknown or out of range, or the samples do not suffice.
    """
    config = read(PartitionConfig, options, "dataset.partition")
    integer("num_clients", num_clients, 1)
    if num_clients > len(labels):
        raise ConfigError(
            f"num_clients={num_clients} is more than the {len(labels)} samples there are; lower num_clients."
        )
    if config.kind == "natural":
        parts = _natural(owners, num_clients)
    else:
        deal = {"iid": _iid, "dirichlet": _dirichlet, "shards": _shards}[config.kind]
        parts = deal(labels, num_clients, seed, config)
    return [np.sort(part) for part in parts]


def _iid(labels: NDArray[np.int64], num_clients: int, seed: int, config: PartitionConfig) -> list[Indices]:
    from flwr_datasets.partitioner import IidPartitioner

    # The partitioner cuts a data set in its given order, so the order is what has to be random.
    order = np.random.default_rng(seed).permutation(len(labels))
    return _parts(IidPartitioner(num_clients), num_clients, index=order)


def _dirichlet(labels: NDArray[np.int64], num_clients: int, seed: int, config: PartitionConfig) -> list[Indices]:
    from flwr_datasets.partitioner import DirichletPartitioner

    if num_clients * config.min_samples > len(labels):
        raise ConfigError(
            f"{num_clients} clients with at least {config.min_samples} samples each need "
            f"{num_clients * config.min_samples} of the {len(labels)} there are; "
            "lower num_clients or dataset.partition.min_samples."
        )
    # The partitioner enforces a minimum by drawing everything again, which practically never ends for
    # many clients and a small alpha. So it draws once, without a minimum, and clients are topped up here.
    partitioner = DirichletPartitioner(
        num_clients,
        partition_by="label",
        alpha=float(config.alpha),
        min_partition_size=0,
        self_balancing=config.self_balancing,
        shuffle=False,
        seed=seed,
    )
    try:
        # With self-balancing a class may be left to clients whose proportions are all 0: 0/0 is NaN, and
        # a NaN cut silently loses or repeats samples.
        with np.errstate(invalid="raise", divide="raise"):
            parts = _parts(partitioner, num_clients, label=labels)
    except (FloatingPointError, ZeroDivisionError) as error:
        raise ConfigError(
            f"No Dirichlet proportions could be drawn for {num_clients} clients with alpha={config.alpha}; "
            "raise dataset.partition.alpha or turn self_balancing off."
        ) from error
    return _top_up(parts, config.min_samples, seed)


def _top_up(parts: list[Indices], minimum: int, seed: int) -> list[Indices]:
    """Move single random samples from the currently largest client until nobody is below the minimum."""
    rng = np.random.default_rng(seed)
    pools = [rng.permutation(part).tolist() for part in parts]
    # A client that receives keeps its old, small size here. It is never mistaken for the largest: while
    # one client is below the minimum and the samples suffice, another is above it.
    largest = [(-len(pool), client) for client, pool in enumerate(pools)]
    heapq.heapify(largest)
    moved = 0
    for pool in pools:
        while len(pool) < minimum:
            size, donor = largest[0]
            pool.append(pools[donor].pop())
            heapq.heapreplace(largest, (size + 1, donor))
            moved += 1
    if moved:
        log.info("Moved %d samples so that every client has at least %d", moved, minimum)
    return [np.array(pool, dtype=np.int64) for pool in pools]


def _shards(labels: NDArray[np.int64], num_clients: int, seed: int, config: PartitionConfig) -> list[Indices]:
    from flwr_datasets.partitioner import ShardPartitioner

    shards = num_clients * config.shards_per_client
    if shards > len(labels):
        raise ConfigError(
            f"{num_clients} clients with {config.shards_per_client} shards each need {shards} samples or "
            f"more, and there are {len(labels)}; lower num_clients or dataset.partition.shards_per_client."
        )
    partitioner = ShardPartitioner(
        num_clients, partition_by="label", num_shards_per_partition=config.shards_per_client, seed=seed
    )
    with warnings.catch_warnings():
        # datasets sorts with an option that pyarrow 25 deprecates; nothing a user could act on.
        warnings.filterwarnings("ignore", message="Specifying null_placement", category=FutureWarning)
        parts = _parts(partitioner, num_clients, label=labels)
    # Shards have equal sizes, so fewer than `shards` samples are over.
    rest = np.setdiff1d(np.arange(len(labels)), np.concatenate(parts))
    classes, numbers = np.unique(labels, return_inverse=True)
    holds = np.zeros((len(classes), num_clients), dtype=bool)
    for client, part in enumerate(parts):
        holds[numbers[part], client] = True
    sizes = np.array([len(part) for part in parts])
    extra: list[list[int]] = [[] for _ in parts]
    for sample in rest:
        holders = np.flatnonzero(holds[numbers[sample]])
        candidates = holders if len(holders) else np.arange(num_clients)
        client = candidates[np.argmin(sizes[candidates])]
        extra[client].append(sample)
        sizes[client] += 1
    return [np.append(part, more).astype(np.int64) for part, more in zip(parts, extra, strict=True)]


def _natural(owners: NDArray[np.str_] | None, num_clients: int) -> list[Indices]:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    if owners is None:
        raise ConfigError(
            "dataset.partition.kind=natural needs a data set with natural clients, and this one has none; "
            "use iid, dirichlet or shards."
        )
    available = len(np.unique(owners))
    if num_clients > available:
        raise ConfigError(
            f"num_clients={num_clients} is more than the {available} natural clients of the data set; "
            f"lower num_clients to {available} or use another dataset.partition.kind."
        )
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
        return _parts(NaturalIdPartitioner("owner"), num_clients, owner=owners)


def _parts(
    partitioner: Any, num_clients: int, *, index: Indices | None = None, **columns: NDArray[Any]
) -> list[Indices]:
    """Run a partitioner on a table of row numbers and the columns it looks at."""
    import datasets

    if index is None:
        index = np.arange(len(next(iter(columns.values()))))
    # The Arrow format hands a column over whole; the others convert it row by row, a second or more.
    partitioner.dataset = datasets.Dataset.from_dict({"index": index, **columns}).with_format("arrow")
    return [partitioner.load_partition(client)[:]["index"].to_numpy() for client in range(num_clients)]
