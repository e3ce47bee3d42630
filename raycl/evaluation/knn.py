"""Judge representations by their neighbors: exact search, and the weighted vote of InstDisc."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError, DataError

__all__ = ["knn_accuracy", "knn_predict", "nearest"]

# Rows of queries and of the bank that meet in one tile. On a CPU the tile (8 MB) and the block of
# the bank stay in the last-level cache; an accelerator wants larger products.
_CPU_BLOCKS = (256, 8_192)
_ACCELERATOR_BLOCKS = (2_048, 32_768)

# Neighboring rows of the bank whose best similarity stands for all of them in the first choice.
_GROUP = 8


@torch.no_grad()
def nearest(
    query: Tensor,
    bank: Tensor,
    *,
    k: int,
    query_block: int | None = None,
    bank_block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the ``k`` rows of the bank with the highest cosine similarity to each query, exactly.

    ``query`` is [num_queries, dim], ``bank`` is [num_rows, dim], of any dtype; rows need not have
    unit length, and a row of zeros has similarity 0 to everything. The maths is float32, or float64
    where either input is (correct, but not fast). ``bank`` may lie on another device than
    ``query``: it travels block by block.

    Returns similarity and index, both [num_queries, min(k, num_rows)], best first, on the query's
    device; of equal similarities the lower index comes first and is kept first.

    Beyond the inputs and the result it holds one float copy of the queries, a block of the bank and
    a tile [query_block, bank_block] with its candidates: under 100 MB on a CPU for 10,000 queries,
    128 dimensions and k = 200, however long the bank. At the worst (very large k, or a block where
    all rows are better than all before) the candidates take 60 bytes an entry of the tile.

    Raises ``ConfigError`` for k or a block below 1, ``DataError`` for wrong shapes, an empty bank
    or values that are not finite.
    """
    _check_rows(query, bank)
    _check_at_least_one("k", k)
    query_block, bank_block = _blocks_for(query, query_block, bank_block)
    wide = torch.float64 in (query.dtype, bank.dtype)
    query = _unit(query.to(torch.float64 if wide else torch.float32), "query")
    similarity = query.new_full((len(query), min(k, len(bank))), -torch.inf)
    index = torch.full_like(similarity, len(bank), dtype=torch.int64)
    for start, rows, group in _spans(len(bank), bank_block):
        block = _unit(bank[start : start + rows].to(query), "bank")
        # Row member-major, so that a group, 8 successive rows of the bank, is a strided column of
        # the tile: its maximum is then a vector operation, and its order is that of the bank.
        block = block.view(-1, group, block.shape[1]).transpose(0, 1).reshape(rows, -1)
        for first in range(0, len(query), query_block):
            part = slice(first, first + query_block)
            tile = _similarity(query[part], block).view(-1, group, rows // group)
            _merge(similarity[part], index[part], tile, start)
    return _top(similarity, index, similarity.shape[1], ordered=True)


def knn_predict(
    query: Tensor,
    bank: Tensor,
    bank_label: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.07,
    num_classes: int | None = None,
    query_block: int | None = None,
    bank_block: int | None = None,
) -> Tensor:
    """Predict each query's class by the weighted vote of its ``k`` nearest rows.

    A neighbor votes for its class with weight exp(similarity / temperature), where similarity is
    the cosine (InstDisc; Wu et al., 2018). ``query`` is [num_queries, dim], ``bank`` is
    [num_rows, dim], ``bank_label`` is [num_rows], any integers from 0 on, gaps allowed. A ``k``
    larger than the bank means the whole bank. ``num_classes``, where given, is a guard: labels must
    lie below it.

    Returns the classes, [num_queries] int64, on the query's device; of classes with equal votes the
    lowest wins. Exact and repeatable on every device. Memory as in ``nearest``, plus about 80 bytes
    for each of the num_queries * k neighbors.

    Raises ``ConfigError`` for k or a block below 1 or a temperature that is not positive,
    ``DataError`` for shapes, labels or values that do not fit.
    """
    if not temperature > 0:
        raise ConfigError(
            f"the temperature of the vote must be positive, got {temperature}; InstDisc uses 0.07"
        )
    _check_rows(query, bank)
    _check_labels("bank_label", bank_label, len(bank), num_classes)
    similarity, index = nearest(query, bank, k=k, query_block=query_block, bank_block=bank_block)
    label = bank_label.to(query.device, torch.int64)[index]  # [num_queries, k]
    return _vote(similarity, label, temperature)


def knn_accuracy(
    query: Tensor,
    query_label: Tensor,
    bank: Tensor,
    bank_label: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.07,
    query_block: int | None = None,
    bank_block: int | None = None,
) -> float:
    """Return the share of queries whose class ``knn_predict`` gets right, 0 to 1 (top-1).

    ``query_label`` is [num_queries]; everything else, errors included, as in ``knn_predict``. No
    query at all is a ``DataError``.
    """
    _check_rows(query, bank)
    _check_labels("query_label", query_label, len(query), None)
    if len(query) == 0:
        raise DataError("there is no query to judge: got 0 rows; give a test set that has some")
    predicted = knn_predict(
        query,
        bank,
        bank_label,
        k=k,
        temperature=temperature,
        query_block=query_block,
        bank_block=bank_block,
    )
    return (predicted == query_label.to(predicted.device)).double().mean().item()


def _spans(num_rows: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Cut the bank into (start, rows, group), rows a multiple of group."""
    start = 0
    while start < num_rows:
        rows = min(block, num_rows - start)
        group = _GROUP if rows >= _GROUP else 1
        rows -= rows % group
        yield start, rows, group
        start += rows


def _similarity(query: Tensor, block: Tensor) -> Tensor:
    """Multiply in full precision, even inside a caller's autocast."""
    with torch.autocast(query.device.type, enabled=False):
        # Not `query @ block.T`: for float32 on a CPU linear takes oneDNN, 2.5 times MKL on AMD.
        return F.linear(query, block)


def _merge(similarity: Tensor, index: Tensor, tile: Tensor, start: int) -> None:
    """Let the rows of a tile, [queries, group, num_groups], compete with the best so far.

    The k best rows lie in the k groups with the highest maxima, so only those are looked into; and
    of these only groups that beat the k-th best so far, which are few once the bank is well begun.
    A later row never displaces an equal earlier one: hence strictly greater.
    """
    k, group = similarity.shape[1], tile.shape[1]
    maximum = tile.amax(dim=1)  # [queries, num_groups]
    num_better = (maximum > similarity.amin(dim=1, keepdim=True)).sum(dim=1)
    chosen = min(k, int(num_better.max()))
    if chosen == 0:
        return
    number = torch.arange(maximum.shape[1], device=tile.device).expand_as(maximum)
    _, best = _top(maximum, number, chosen)
    member = torch.arange(group, device=tile.device)[:, None]
    candidate = tile.gather(2, best[:, None, :].expand(-1, group, -1))
    candidate_index = start + best[:, None, :] * group + member
    merged = _top(
        torch.cat([similarity, candidate.flatten(1)], dim=1),
        torch.cat([index, candidate_index.flatten(1)], dim=1),
        k,
    )
    similarity.copy_(merged[0])
    index.copy_(merged[1])


def _top(similarity: Tensor, index: Tensor, k: int, *, ordered: bool = False) -> tuple[Tensor, Tensor]:
    """Return the first k of each row, by falling similarity, then by rising index."""
    if similarity.dtype == torch.float64:
        index, order = index.sort(dim=1)
        similarity, order = similarity.gather(1, order).sort(dim=1, descending=True, stable=True)
        return similarity[:, :k], index.gather(1, order)[:, :k]
    # topk promises nothing about ties. One integer that orders like (similarity, -index) has none,
    # and is no slower to select than a float. A float's bits order like an integer once those of
    # negative numbers are turned round; adding 0 makes -0 equal 0.
    bits = _turn((similarity + 0.0).view(torch.int32))
    key = (bits.to(torch.int64) << 32).bitwise_or_(index ^ 0xFFFFFFFF)
    key = key.topk(k, dim=1, sorted=ordered).values
    bits = _turn((key >> 32).to(torch.int32))
    return bits.view(torch.float32), (key & 0xFFFFFFFF) ^ 0xFFFFFFFF


def _turn(bits: Tensor) -> Tensor:
    """Turn round the magnitude bits of negative numbers; twice is nothing."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _vote(similarity: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Add up the weights of each row's labels, [num_queries, k], and return the heaviest."""
    # The best similarity is taken off: the weights then lie in (0, 1], and the vote is the same.
    logits = (similarity.double() - similarity[:, :1].double()) / temperature
    # Whole numbers: their sum does not depend on the order in which CUDA adds, so ties are ties.
    weight = (logits.exp() * (2.0**62 / label.shape[1])).long()
    label, order = label.sort(dim=1)
    # Number the distinct labels of each row: a table [num_queries, k] serves any set of labels.
    change = F.pad(label[:, 1:] != label[:, :-1], (1, 0))
    slot = change.cumsum(dim=1)
    votes = torch.zeros_like(weight).scatter_add_(1, slot, weight.gather(1, order))
    winner = votes.argmax(dim=1, keepdim=True)
    return label.gather(1, (slot == winner).int().argmax(dim=1, keepdim=True)).squeeze(1)


def _unit(rows: Tensor, name: str) -> Tensor:
    """Scale rows to unit length; a row of zeros stays one."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if not bool(norm.isfinite().all()):
        raise DataError(
            f"{name} has rows whose length is not finite; "
            "look for nan, inf or huge values in the representations"
        )
    return rows / norm.clamp_min(1e-12)


def _blocks_for(query: Tensor, query_block: int | None, bank_block: int | None) -> tuple[int, int]:
    """Return the block sizes asked for, or those that suit the device."""
    default = _CPU_BLOCKS if query.device.type == "cpu" else _ACCELERATOR_BLOCKS
    query_block = default[0] if query_block is None else query_block
    bank_block = default[1] if bank_block is None else bank_block
    _check_at_least_one("query_block", query_block)
    _check_at_least_one("bank_block", bank_block)
    return query_block, bank_block


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}; give a positive number of rows")


def _check_rows(query: Tensor, bank: Tensor) -> None:
    if query.ndim != 2 or bank.ndim != 2 or query.shape[1] != bank.shape[1]:
        raise DataError(
            "query and bank must be [num_queries, dim] and [num_rows, dim] of one dim, got "
            f"{list(query.shape)} and {list(bank.shape)}; embed both with the same encoder"
        )
    if len(bank) == 0:
        raise DataError("the bank is empty: got 0 rows; give the rows that are to be searched")


def _check_labels(name: str, label: Tensor, num_rows: int, num_classes: int | None) -> None:
    if label.shape != (num_rows,):
        raise DataError(
            f"{name} must be one label a row, [{num_rows}], got {list(label.shape)}; "
            "check that rows and labels come from the same set"
        )
    if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
        raise DataError(f"{name} must be integers, got {label.dtype}; number the classes from 0")
    if num_rows and int(label.min()) < 0:
        raise DataError(f"{name} must be 0 or more, got {int(label.min())}; leave unlabeled rows out")
    if num_classes is not None and num_rows and int(label.max()) >= num_classes:
        raise DataError(
            f"{name} must lie below num_classes = {num_classes}, got {int(label.max())}; "
            "raise num_classes, or check the label column"
        )
