"""Streaming linear algebra over the clients' updates: Gram matrices, cross products, combinations.

Most methods of this suite move the model inside the span of the updates, direction = β·reference + Σ α_i g_i,
so the work that grows with the model's size d is only what is in this file. Each function reads the updates
once, a block of columns at a time, in float64: beyond the updates themselves it holds one block and its
result. A solver then works on m × m matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# A block of columns holds about this many bytes in float64. Large enough that the matrix products run at
# full speed, small enough to be a few per cent of the updates it is cut from.
BLOCK_BYTES = 3 * 2**20
# Shorter pieces of many clients' rows cost more to find in memory than to read.
_MIN_COLUMNS = 2048
# Rows of a Gram matrix formed at a time: with m rows in all, (m + panel) / 2m of the full product's work.
_PANEL = 128

Blocks = Iterable[tuple[slice, Tensor]]
"""Column blocks of an (m, d) matrix: (columns, float64 tensor of shape (m, columns)), each used before the next."""


@dataclass(frozen=True)
class Gram:
    """Inner products of the updates among themselves and with a reference.

    Attributes
    ----------
    matrix : Tensor, (m, m), float64
        G_ij = ⟨g_i, g_j⟩.
    cross : Tensor, (m,) or (m, h), float64
        ⟨g_i, reference⟩, a column for each of h references; zero without a reference.
    """

    matrix: Tensor
    cross: Tensor


@dataclass(frozen=True)
class Combinations:
    """k linear combinations of the updates and what they mean to each client.

    Attributes
    ----------
    vectors : Tensor, (keep, d), float64
        β_k·reference + Σ_i α_ki g_i, the first `keep` of them.
    products : Tensor, (k, m), float64
        ⟨g_i, vectors_k⟩.
    squared_norms : Tensor, (m,), float64
        ‖g_i‖².
    """

    vectors: Tensor
    products: Tensor
    squared_norms: Tensor


def block_columns(m: int) -> int:
    """Columns in a block of `m` float64 rows."""
    return max(_MIN_COLUMNS, BLOCK_BYTES // (8 * max(m, 1)))


def column_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut an (m, d) tensor of any real floating dtype into float64 column blocks."""
    m, d = matrix.shape
    step = 2 * block_columns(m)  # the whole matrix is in memory anyway, and wider products are a little faster
    for start in range(0, d, step):
        columns = slice(start, min(start + step, d))
        yield columns, matrix[:, columns].to(torch.float64)


def gram(blocks: Blocks, m: int, reference: Tensor | None = None, *, device: torch.device) -> Gram:
    """Accumulate G = A Aᵀ and A·reference over the column blocks of A, (m, d).

    Parameters
    ----------
    blocks : iterable of (slice, Tensor)
        Column blocks, float64, each (m, c), on `device`.
    m : int
        Number of rows; needed because a layer may have no columns.
    reference : Tensor, (d,) or (h, d), optional
        One or several; taken as zero when absent.
    """
    matrix = torch.zeros((m, m), dtype=torch.float64, device=device)
    several = reference is not None and reference.ndim == 2
    shape = (m, len(reference)) if reference is not None and several else (m,)
    cross = torch.zeros(shape, dtype=torch.float64, device=device)
    panels = [slice(low, min(low + _PANEL, m)) for low in range(0, m, _PANEL)]
    for columns, block in blocks:
        for rows in panels:  # the lower triangle
            matrix[rows, : rows.stop].addmm_(block[rows], block[: rows.stop].T)
        if reference is not None and several:
            cross.addmm_(block, reference[:, columns].to(torch.float64).T)
        elif reference is not None:
            cross.addmv_(block, reference[columns])
    for rows in panels:
        matrix[: rows.start, rows] = matrix[rows, : rows.start].T
    return Gram(matrix, cross)


def combine(
    blocks: Blocks,
    coefficients: Tensor,
    d: int,
    reference: Tensor | None = None,
    reference_weights: Tensor | None = None,
    *,
    keep: int | None = None,
) -> Combinations:
    """Form k combinations of the rows of A, (m, d), and their inner products with every row, in one read.

    Parameters
    ----------
    blocks : iterable of (slice, Tensor)
        Column blocks of A, float64, each (m, c), on the device of `coefficients`.
    coefficients : Tensor, (k, m), float64
        α.
    d : int
        Number of columns of A.
    reference : Tensor, (d,), float64, optional
    reference_weights : Tensor, (k,), float64, optional
        β; zero when absent.
    keep : int, optional
        How many of the k vectors are wanted; of the others only the inner products are. All by default.
    """
    k, m = coefficients.shape
    keep = k if keep is None else keep
    vectors = torch.empty((keep, d), dtype=torch.float64, device=coefficients.device)
    products = torch.zeros((k, m), dtype=torch.float64, device=coefficients.device)
    squared_norms = torch.zeros(m, dtype=torch.float64, device=coefficients.device)
    for columns, block in blocks:
        part = coefficients @ block
        if reference is not None and reference_weights is not None:
            part.addr_(reference_weights, reference[columns])
        vectors[:, columns] = part[:keep]
        products.addmm_(part, block.T)
        squared_norms += torch.linalg.vector_norm(block, dim=1).square_()
    return Combinations(vectors, products, squared_norms)
