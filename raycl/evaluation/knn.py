"""Exact nearest neighbors and the weighted kNN vote of InstDisc."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError, DataError

# Rows of queries and of the bank in a tile. On a CPU the tile (8 MB) and the block of the bank stay in
# the last-level cache; an accelerator needs larger products.
_CPU_BLOCKS = (256, 8_192)
_ACCELERATOR_BLOCKS = (2_048, 32_768)

# Successive rows of the bank that the preselection represents by their highest similarity.
_GROUP = 8

# Returns the places in a tile of queries by rows of the bank that must not be found, [num_places, 2].
Mask = Callable[[slice, slice], Tensor]


@torch.no_grad()
def nearest(query: Tensor, bank: Tensor, *, k: int, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Find the ``k`` rows of the bank with the highest cosine similarity to each query, exactly.

    ``query`` is [num_queries, dim], ``bank`` is [num_rows, dim], of any dtype; rows need not have unit
    length, and a row of zeros has similarity 0 to all others. Computes in float32, or in float64 if either
    input is (correct, but slow). ``bank`` may be on another device than ``query``: blocks are copied one
    by one.

    Returns similarity and index, both [num_queries, min(k, num_rows)], best first, on the query's device.
    Ties are in order of index. With a ``mask`` of pairs that are not to be found, places that no row is left for have a
    similarity of -inf and an index without meaning.

    Beside inputs and result it needs a float copy of the queries, a block of the bank and a tile of queries
    by rows of the bank with its candidates: under 100 MB on a CPU for 10,000 queries, 128 dimensions
    and k = 200, for a bank of any length. In the worst case (very large k, or a block whose rows all beat
    all earlier ones) the candidates take 60 bytes per entry of the tile.

    Raises ``ConfigError`` for k below 1, ``DataError`` for an empty bank, another dim, or values that are not finite.
    """
    if query.shape[1:] != bank.shape[1:]:
        raise DataError(
            f"queries have the shape {list(query.shape)} and the bank {list(bank.shape)}; give rows of the same encoder"
        )
    if len(bank) == 0:
        raise DataError("the bank is empty: got 0 rows; give the rows to search")
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}; give a positive number of rows")
    query_block, bank_block = _CPU_BLOCKS if query.device.type == "cpu" else _ACCELERATOR_BLOCKS
    wide = torch.float64 in (query.dtype, bank.dtype)
    query = _unit(query.to(torch.float64 if wide else torch.float32), "query")
    similarity = query.new_full((len(query), min(k, len(bank))), -torch.inf)
    index = torch.full_like(similarity, len(bank), dtype=torch.int64)
    for start, rows, group in _spans(len(bank), bank_block):
        block = _unit(bank[start : start + rows].to(query), "bank")
        # A group is 8 successive rows of the bank. Member-major order makes it a strided column of the
        # tile, so its maximum is a vector operation, and keeps the order of the bank.
        block = block.view(-1, group, block.shape[1]).transpose(0, 1).reshape(rows, -1)
        for first in range(0, len(query), query_block):
            part = slice(first, first + query_block)
            tile = _similarity(query[part], block).view(-1, group, rows // group)
            if mask is not None:
                row, column = mask(part, slice(start, start + rows)).to(tile.device).unbind(1)
                tile[row, column % group, column // group] = -torch.inf
            _merge(similarity[part], index[part], tile, start)
    return _top(similarity, index, similarity.shape[1], ordered=True)


def knn_predict(
    query: Tensor,
    bank: Tensor,
    bank_label: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.07,
) -> Tensor:
    """Predict each query's class by the weighted vote of its ``k`` nearest rows.

    A neighbor votes for its class with weight exp(cosine / temperature) (InstDisc; Wu et al., 2018).
    ``query`` is [num_queries, dim], ``bank`` is [num_rows, dim], ``bank_label`` is [num_rows], integers
    from 0 with gaps allowed. A ``k`` larger than the bank means the whole bank.

    Returns classes [num_queries] int64 on the query's device; the lowest class wins ties. Exact and
    repeatable on every device. Memory as in ``nearest``, plus about 80 bytes for each of the
    num_queries * k neighbors.

    Raises ``ConfigError`` for k below 1 or a temperature that is not positive, ``DataError`` for negative
    labels, an empty bank or values that are not finite.
    """
    if not temperature > 0:
        raise ConfigError(
            f"the temperature of the vote must be positive, got {temperature}; InstDisc uses 0.07"
        )
    _check_labels("bank_label", bank_label, bank)
    similarity, index = nearest(query, bank, k=k)
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
) -> float:
    """Return the top-1 accuracy of ``knn_predict``, 0 to 1.

    ``query_label`` is [num_queries]; the rest as in ``knn_predict``. Raises ``DataError`` without queries.
    """
    _check_labels("query_label", query_label, query)
    if len(query) == 0:
        raise DataError("the set of queries is empty: got 0 rows; give a test set with some")
    predicted = knn_predict(query, bank, bank_label, k=k, temperature=temperature)
    return (predicted == query_label.to(predicted.device)).double().mean().item()


def _spans(num_rows: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Cut the bank into spans (start, rows, group); rows is a multiple of group."""
    start = 0
    while start < num_rows:
        rows = min(block, num_rows - start)
        group = _GROUP if rows >= _GROUP else 1
        rows -= rows % group
        yield start, rows, group
        start += rows


def _similarity(query: Tensor, block: Tensor) -> Tensor:
    """Multiply in full precision, also under autocast."""
    with torch.autocast(query.device.type, enabled=False):
        # Not `query @ block.T`: linear uses oneDNN for float32 on a CPU, 2.5 times as fast as MKL on AMD.
        return F.linear(query, block)


def _merge(similarity: Tensor, index: Tensor, tile: Tensor, start: int) -> None:
    """Merge the rows of a tile [queries, group, num_groups] into the best so far.

    The k best rows lie in the k groups with the highest maxima. Only groups that beat the k-th best so far
    are searched, which soon become few. The comparison is strict, so a later row never
    displaces an equal earlier one.
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
    """Return the first k of each row by descending similarity, then ascending index."""
    if similarity.dtype == torch.float64:
        index, order = index.sort(dim=1)
        similarity, order = similarity.gather(1, order).sort(dim=1, descending=True, stable=True)
        return similarity[:, :k], index.gather(1, order)[:, :k]
    # topk leaves ties undefined. One integer that orders like (similarity, -index) has no ties, and topk
    # is as fast on it. A float's bits order like an integer after flipping the magnitude bits of negative
    # numbers; adding 0 makes -0 equal 0.
    bits = _flip_negative((similarity + 0.0).view(torch.int32))
    key = (bits.to(torch.int64) << 32).bitwise_or_(index ^ 0xFFFFFFFF)
    key = key.topk(k, dim=1, sorted=ordered).values
    bits = _flip_negative((key >> 32).to(torch.int32))
    return bits.view(torch.float32), (key & 0xFFFFFFFF) ^ 0xFFFFFFFF


def _flip_negative(bits: Tensor) -> Tensor:
    """Flip the magnitude bits of negative numbers; applied twice it changes nothing."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _vote(similarity: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Sum the weights of each row's labels [num_queries, k] and return the label with the largest sum."""
    # Subtracting the best similarity puts the weights into (0, 1] and does not change the vote.
    logits = (similarity.double() - similarity[:, :1].double()) / temperature
    # Sums of integers do not depend on the order in which CUDA adds, so ties stay ties.
    weight = (logits.exp() * (2.0**62 / label.shape[1])).long()
    label, order = label.sort(dim=1)
    # Number the distinct labels of each row: a table [num_queries, k] serves any set of labels.
    change = F.pad(label[:, 1:] != label[:, :-1], (1, 0))
    slot = change.cumsum(dim=1)
    votes = torch.zeros_like(weight).scatter_add_(1, slot, weight.gather(1, order))
    winner = votes.argmax(dim=1, keepdim=True)
    return label.gather(1, (slot == winner).int().argmax(dim=1, keepdim=True)).squeeze(1)


def _unit(rows: Tensor, name: str) -> Tensor:
    """Scale rows to unit length; a row of zeros stays zero."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if not bool(norm.isfinite().all()):
        raise DataError(
            f"{name} has rows with a norm that is not finite; "
            "look for nan, inf or huge values in the representations"
        )
    return rows / norm.clamp_min(1e-12)


def _check_labels(name: str, label: Tensor, rows: Tensor) -> None:
    check_label_shape(name, label, rows)
    if len(label) and int(label.min()) < 0:
        raise DataError(f"{name} must be 0 or more, got {int(label.min())}; leave unlabeled rows out")


def check_label_shape(name: str, label: Tensor, rows: Tensor) -> None:
    """Raise ``DataError`` unless there is an integer for each row: other shapes would be compared row by row."""
    if label.shape != rows.shape[:1] or label.is_floating_point():
        raise DataError(
            f"{name} must be integers [{len(rows)}], one for each row, got {label.dtype} {list(label.shape)}; "
            "give one class number for each row"
        )
