"""Metrics of embeddings that distinguish a healthy run from a collapsed one.

``measure`` takes any rows, and the other functions float32 rows of unit length. NaN and infinity count as zero, since a
metric must not stop training: the loss refuses such rows.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError

MAX_ROWS = 256  # of a batch that are measured: the eigenvalues of more would take too long
_STRIP_ROWS = 256  # compared with all others at a time


@final
@dataclass(frozen=True, kw_only=True)
class Measures:
    """The metrics of :func:`measure`; ``alignment`` and ``positive_negative_gap`` are None without keys.

    The smaller of ``num_rows`` measured and ``dim`` is the largest possible effective rank.
    """

    num_rows: int
    dim: int
    uniformity: float
    effective_rank: float
    embedding_std: float
    alignment: float | None = None
    positive_negative_gap: float | None = None

    def known(self) -> dict[str, float]:
        """Return the metrics by name, without the ones that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@torch.no_grad()
def measure(query: Tensor, key: Tensor | None = None) -> Measures:
    """Measure embeddings [n, dim] and, if given, the keys [n, dim] whose row i is query i's positive.

    The rows need not have unit length. Measures the first ``MAX_ROWS`` of them on the CPU, which takes a few
    milliseconds and waits for a GPU only once.

    Raises:
        ConfigError: The tensors are not [n, dim] of one shape, with at least one row.
    """
    if query.ndim != 2 or 0 in query.shape:
        raise ConfigError(
            f"the queries are not [n, dim] with at least one row: got {list(query.shape)}; "
            "pass one embedding per row"
        )
    rows = _unit(query)
    found = Measures(
        num_rows=len(rows),
        dim=rows.shape[1],
        uniformity=uniformity(rows),
        effective_rank=effective_rank(rows),
        embedding_std=embedding_std(rows),
    )
    if key is None:
        return found
    if key.shape != query.shape:
        raise ConfigError(
            f"the keys do not match the queries: got {list(key.shape)} for {list(query.shape)}; "
            "pass one key, the positive, for each query"
        )
    keys = _unit(key)
    gap = positive_negative_gap(rows, keys)
    return replace(found, alignment=alignment(rows, keys), positive_negative_gap=gap)


def alignment(query: Tensor, key: Tensor) -> float:
    """Return the mean squared distance of positives (Wang and Isola, 2020); unit rows [n, dim].

    It is between 0, for equal queries and keys, and 4.
    """
    return (query - key).square().sum(1).mean().item()


def uniformity(rows: Tensor) -> float:
    """Return log mean exp(-2 * squared distance) over pairs of distinct rows (Wang and Isola, 2020).

    It is 0 for unit rows [n, dim] at one point and for a single row, and falls as they spread over the sphere,
    to about -4. Only strips of the [n, n] distances are in memory.
    """
    num_rows = len(rows)
    if num_rows == 1:
        return 0.0
    strips = [_log_kernel_sum(rows, start) for start in range(0, num_rows, _STRIP_ROWS)]
    return torch.stack(strips).logsumexp(0).item() - math.log(num_rows * (num_rows - 1))


def effective_rank(rows: Tensor) -> float:
    """Return exp(entropy of the normalized singular values) of rows [n, dim] (Roy and Vetterli, 2007).

    The rows are **not centered**, so that rows at one point have rank 1: centering would leave only rounding
    errors, which look like full rank. The largest value is min(n, dim).
    """
    # float64, for squares of singular values down to 1e-7 of the largest.
    exact = rows.double()
    square = exact.T @ exact if len(exact) > exact.shape[1] else exact @ exact.T
    singular = torch.linalg.eigvalsh(square).clamp(min=0).sqrt()
    total = singular.sum()
    if total == 0:
        return 1.0  # rows of zeros are a point, too
    share = singular / total
    return torch.special.entr(share).sum().exp().item()


def embedding_std(rows: Tensor) -> float:
    """Return the mean over dims of the rows' standard deviation, times sqrt(dim); unit rows [n, dim].

    It is about 1 for rows evenly spread over the sphere and 0 for rows at one point or a single row (Chen and He,
    2021, detect collapse by it).
    """
    # torch's std over the first dim takes five times as long.
    deviation = (rows - rows.mean(0)).square_().mean(0).sqrt_()
    return deviation.mean().item() * math.sqrt(rows.shape[1])


def positive_negative_gap(query: Tensor, key: Tensor) -> float:
    """Return the mean similarity of positives minus the mean of all other pairs of query and key.

    It takes O(n * dim) for rows [n, dim], since the sum over all pairs is a product of two sums. A single pair has
    a gap of 0.
    """
    num_rows = len(query)
    if num_rows == 1:
        return 0.0
    positives = (query * key).sum()
    others = (query.sum(0) * key.sum(0)).sum() - positives
    return (positives / num_rows - others / (num_rows * (num_rows - 1))).item()


def _log_kernel_sum(rows: Tensor, start: int) -> Tensor:
    """Return the log of the sum of exp(-2 * squared distance) from a strip of rows to all others."""
    with torch.autocast(rows.device.type, enabled=False):
        similarity = rows[start : start + _STRIP_ROWS] @ rows.T
    exponent = similarity.sub_(1).mul_(4)  # unit rows: their squared distance is 2 - 2 * similarity
    exponent.diagonal(start).fill_(-math.inf)
    return exponent.flatten().logsumexp(0)


def _unit(rows: Tensor) -> Tensor:
    """Return the first rows in float32 with unit length, on the CPU, without NaN and infinity."""
    clean = rows[:MAX_ROWS].detach().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return F.normalize(clean.cpu(), dim=1)
