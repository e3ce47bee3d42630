"""Reference losses, written plainly over all pairs at once, for comparison with the tiled ones."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# All variants of a hinge loss over a batch.
WAYS: list[dict[str, Any]] = [
    {"hardest": hardest, "bidirectional": both} for hardest in (False, True) for both in (False, True)
]


def weighted_mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of the losses of rows, or their mean with weights."""
    return losses.mean() if weight is None else (weight * losses).sum() / weight.sum()


def are_known(query_id: Tensor, candidate_id: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return for each query and candidate whether their ids form one of the pairs, one by one."""
    known = set(zip(*(ids.tolist() for ids in pairs), strict=True))
    answers = [
        (query, candidate) in known for query in query_id.tolist() for candidate in candidate_id.tolist()
    ]
    return torch.tensor(answers, dtype=torch.bool).view(len(query_id), len(candidate_id))


def are_pairs(query_id: Tensor, candidate_id: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return whether the batch contains a pair with these ids, [queries, candidates]."""
    of_query = query_id[:, None] == batch["query_id"]
    of_candidate = candidate_id[:, None] == batch["key_id"]
    return of_query.double() @ of_candidate.double().T > 0  # the number of pairs with both ids


def are_nearer(
    rows: Tensor, positives: Tensor, candidates: Tensor, *, margin: float = 0.0, relative: bool = False
) -> Tensor:
    """Return for each row and candidate whether it is nearer than the row's positive less the margin, one by one."""
    answers = []
    for row, positive in zip(rows.double(), positives.double(), strict=True):
        near = float(row @ positive)
        limit = near - margin * abs(near) if relative else near - margin
        answers += [float(row @ candidate) > limit for candidate in candidates.double()]
    return torch.tensor(answers, dtype=torch.bool).view(len(rows), len(candidates))


def plain_nt_xent(
    view_a: Tensor,
    view_b: Tensor,
    temperature: Tensor,
    gathered_a: Tensor | None = None,
    gathered_b: Tensor | None = None,
    *,
    offset: int = 0,
    ids: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the loss as in the paper: the full matrix, one cross entropy."""
    gathered_a = view_a if gathered_a is None else gathered_a
    gathered_b = view_b if gathered_b is None else gathered_b
    logits = torch.cat([view_a, view_b]) @ torch.cat([gathered_a, gathered_b]).T / temperature
    index = torch.arange(len(view_a)) + offset
    own = torch.cat([index, index + len(gathered_a)])
    positive = torch.cat([index + len(gathered_a), index])
    masked = torch.zeros(logits.shape, dtype=torch.bool)
    if ids is not None:
        masked |= ids[0].repeat(2)[:, None] == ids[1].repeat(2)
    masked[torch.arange(len(own)), own] = True
    masked[torch.arange(len(own)), positive] = False
    losses = F.cross_entropy(logits.masked_fill(masked, -torch.inf), positive, reduction="none")
    return weighted_mean(losses, None if weight is None else weight.repeat(2))


def plain_dcl(
    view_a: Tensor,
    view_b: Tensor,
    temperature: Tensor,
    *,
    sigma: float | None = None,
    ids: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the loss as in the paper, row by row: no view of the row's sample is a negative."""
    similarity = (view_a * view_b).sum(1)
    of_positive = torch.ones_like(similarity)
    if sigma is not None:
        scores = (similarity.detach() / sigma).exp()
        of_positive = 2 - scores / scores.mean()
    rows, sample = torch.cat([view_a, view_b]), torch.arange(len(view_a)) if ids is None else ids[0]
    losses = []
    for i, row in enumerate(rows):
        k = i % len(view_a)
        negatives = rows[(sample != sample[k]).repeat(2) & (torch.arange(len(rows)) % len(view_a) != k)]
        positive = similarity[k] / temperature
        losses.append((negatives @ row / temperature).logsumexp(0) - of_positive[k] * positive)
    return weighted_mean(torch.stack(losses), None if weight is None else weight.repeat(2))


def plain_gcl(
    view_a: Tensor,
    view_b: Tensor,
    temperature: Tensor,
    *,
    stored: Tensor,
    momentum: float,
    num_samples: int,
    ids: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss as in the paper's algorithm 1, given u of each sample (0: none), and the batch's own u."""
    rows, sample = torch.cat([view_a, view_b]), torch.arange(len(view_a)) if ids is None else ids[0]
    place = torch.arange(len(view_a)).repeat(2)
    losses, means = [], []
    for i, row in enumerate(rows):
        k = i % len(view_a)
        negatives = rows[(sample != sample[k]).repeat(2) & (place != k)]
        mean = (negatives @ row / temperature).exp().sum() / max(1, len(rows) - 2)
        if len(negatives) == 0:
            mean = (-1 / temperature.detach()).exp()
        of_view = momentum * stored[k] + (1 - momentum) * mean if stored[k] else mean
        positive = view_a[k] @ view_b[k] / temperature
        value = (of_view * (2 * num_samples - 2)).log() - positive
        # The gradient of the mean is divided by u, not that of log(u), which has a factor 1 - momentum.
        slope = mean / of_view.detach() - positive
        losses.append(value.detach() + slope - slope.detach())
        means.append(mean.detach())
    loss = weighted_mean(torch.stack(losses), None if weight is None else weight.repeat(2))
    return loss, torch.stack(means).view(2, -1).mean(0)


def plain_gcl_of_pairs(
    query: Tensor,
    key: Tensor,
    temperature: Tensor,
    *,
    stored: Tensor,
    momentum: float,
    num_samples: int,
    ids: tuple[Tensor, Tensor],
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss as in FastCLIP's algorithm 1, given u of each side [batch, 2] (0: none), and the batch's own u."""
    batch, logits = len(query), query @ key.T / temperature
    positives = logits.diagonal()
    allowed = ~are_known(*ids, pairs=ids) & ~torch.eye(batch, dtype=torch.bool)
    losses, means = [], []
    for side, (rows, is_negative) in enumerate(((logits, allowed), (logits.T, allowed.T))):
        for i, row in enumerate(rows):
            others = row[is_negative[i]]
            g = (others - positives[i]).exp().sum() / (batch - 1)
            mean = g.detach() if len(others) else (-1 / temperature - positives[i]).exp().detach()
            before = stored[i, side]
            u = momentum * before + (1 - momentum) * mean if before else mean
            value = (u * (num_samples - 1)).log()
            losses.append(value + g / u - (g / u).detach())
            means.append(mean)
    loss = weighted_mean(torch.stack(losses).view(2, batch).mean(0), weight)
    return loss, torch.stack(means).view(2, batch).T


def plain_info_nce(
    query: Tensor,
    key: Tensor,
    temperature: Tensor,
    negatives: Tensor | None = None,
    *,
    in_batch: bool = True,
    offset: int = 0,
    ids: tuple[Tensor, Tensor] | None = None,
    negative_id: Tensor | None = None,
    pair_ids: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    nearer: Tensor | None = None,
) -> Tensor:
    """Compute the loss as in the papers: own key first, then all candidates, cross entropy.

    ``nearer`` [queries, candidates] are further masked candidates.
    """
    index = torch.arange(len(query)) + offset
    positive = (query * key[index]).sum(1, keepdim=True)
    similarity, masked = [positive], [torch.zeros(len(query), 1, dtype=torch.bool)]
    if in_batch:
        similarity.append(query @ key.T)
        own = F.one_hot(index, len(key)).bool()
        if pair_ids is not None:
            own |= are_known(pair_ids[0][index], pair_ids[1], pair_ids)
        masked.append(own if ids is None else own | (ids[0][:, None] == ids[1]))
    if negatives is not None:
        similarity.append(query @ negatives.T)
        same = torch.zeros(len(query), len(negatives), dtype=torch.bool)
        if negative_id is not None and pair_ids is not None:
            same = are_known(pair_ids[0][index], negative_id, pair_ids)
        masked.append(same if negative_id is None or ids is None else ids[0][:, None] == negative_id)
    logits = torch.cat(similarity, 1) / temperature
    logits = logits.masked_fill(torch.cat(masked, 1), -torch.inf)
    if nearer is not None:
        kept = torch.zeros(len(query), 1, dtype=torch.bool)
        logits = logits.masked_fill(torch.cat([kept, nearer], 1), -torch.inf)
    losses = F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64), reduction="none")
    return weighted_mean(losses, weight)


def plain_bidirectional(
    queries: Tensor,
    keys: Tensor,
    temperature: Tensor,
    negatives: Tensor,
    *,
    own: slice = slice(None),
    query_id: Tensor | None = None,
    key_id: Tensor | None = None,
    negative_id: Tensor | None = None,
    key_log_frequency: Tensor | None = None,
    negative_log_frequency: Tensor | None = None,
    refines_logq: bool = False,
    weight: Tensor | None = None,
    nearer: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write the loss down with all pairs of the batch at once; ``own`` are this worker's.

    ``nearer`` are further masked candidates: of queries [batch, batch + negatives], and of keys [batch, batch].
    """
    pair = torch.arange(len(keys))
    ids = {
        "query_id": pair if query_id is None else query_id,
        "key_id": pair if key_id is None else key_id,
    }
    false = are_pairs(ids["query_id"], ids["key_id"], ids) & ~torch.eye(len(keys), dtype=torch.bool)
    false_negatives = torch.zeros(len(keys), len(negatives), dtype=torch.bool)
    if negative_id is not None:
        false_negatives = are_pairs(ids["query_id"], negative_id, ids)
    similarity, others = queries @ keys.T / temperature, queries @ negatives.T / temperature
    off = 0.0 if key_log_frequency is None else key_log_frequency.double()
    off_negatives = 0.0 if negative_log_frequency is None else negative_log_frequency.double()
    forth = torch.cat([similarity - off, others - off_negatives], 1)
    forth = forth.masked_fill(torch.cat([false, false_negatives], 1), -torch.inf)
    back = similarity.T.masked_fill(false.T, -torch.inf)
    if nearer is not None:
        is_other = ~torch.eye(*forth.shape, dtype=torch.bool)
        forth = forth.masked_fill(nearer[0] & is_other, -torch.inf)
        back = back.masked_fill(nearer[1] & is_other[:, : len(keys)], -torch.inf)
    if refines_logq:
        assert key_log_frequency is not None, "the refined correction needs frequencies"
        to_keys = plain_refined_logq(forth, similarity.diagonal(), key_log_frequency.double())[own]
    else:
        to_keys = F.cross_entropy(forth[own], pair[own], reduction="none")
    to_queries = F.cross_entropy(back[own], pair[own], reduction="none")
    return weighted_mean((to_keys + to_queries) / 2, None if weight is None else weight[own])


def plain_refined_logq(corrected: Tensor, positive: Tensor, log_frequency: Tensor) -> Tensor:
    """Compute the loss of Khrylchenko et al. (2025), section 3.3, row by row.

    ``corrected`` [rows, candidates] are logits minus log Q, with the positives on the diagonal; ``positive``
    [rows] are their logits; ``log_frequency`` [rows] is log Q of the positives.
    """
    losses = []
    for i, row in enumerate(corrected):
        others = torch.cat([row[:i], row[i + 1 :]])
        others = others[others > -torch.inf]  # of the row's true negatives
        if not len(others):
            losses.append(0 * positive[i])
            continue
        # Negatives are drawn from Q without the positive: Q' = Q / (1 - Q(positive)).
        terms = (others + (1 - log_frequency[i].exp()).log()).exp()
        p_positive = positive[i].exp() / (positive[i].exp() + terms.mean())
        losses.append(-(1 - p_positive).detach() * (positive[i].exp() / terms.sum()).log())
    return torch.stack(losses)


def plain_direction(
    similarity: Tensor, positive: Tensor, allowed: Tensor, margin: float, hardest: bool
) -> Tensor:
    """Return the loss of each row [n]: similarity and allowed [n, num_candidates], positive [n]."""
    excess = F.relu(margin + similarity - positive[:, None])  # the gradient at 0 is 0
    if hardest and allowed.shape[1]:
        # In a tie, max returns the first value, and only that one gets the gradient.
        index = similarity.masked_fill(~allowed, -torch.inf).max(1, keepdim=True).indices
        return (excess * allowed).gather(1, index)[:, 0]
    return (excess * allowed).sum(1) / allowed.sum(1).clamp(min=1)


def plain_hinge(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor | None = None,
    *,
    margin: float,
    hardest: bool = False,
    bidirectional: bool = True,
    in_batch: bool = True,
    own: slice = slice(None),
    batch_id: Tensor | None = None,
    pair_ids: tuple[Tensor, Tensor] | None = None,
    negative_id: Tensor | None = None,
) -> Tensor:
    """Write the loss down with all pairs of the batch at once; ``own`` are this worker's."""
    if negatives is None:
        negatives = queries.new_empty(0, queries.shape[1])
    ids = torch.arange(len(keys)) if batch_id is None else batch_id
    others = torch.full((len(negatives),), -1) if negative_id is None else negative_id
    similarity, positive = queries @ keys.T, (queries * keys).sum(1)
    false, false_others = ids[:, None] == ids, ids[:, None] == others
    if pair_ids is not None:
        false, false_others = (are_known(pair_ids[0], each, pair_ids) for each in (pair_ids[1], others))
    different = ~false & ~torch.eye(len(keys), dtype=torch.bool)
    rows = plain_direction(
        torch.cat([similarity, queries @ negatives.T], 1),
        positive,
        torch.cat([different & in_batch, ~false_others], 1),
        margin,
        hardest,
    )[own].mean()
    if not bidirectional:
        return rows
    return (rows + plain_direction(similarity.T, positive, different.T, margin, hardest)[own].mean()) / 2


def plain_nce(
    query: Tensor,
    positive: Tensor,
    noise: Tensor,
    temperature: Tensor,
    num_samples: int,
    log_normalizer: float,
    masked: Tensor | None = None,
) -> Tensor:
    """Compute the loss as in the paper: P, then h, then logarithms; row by row."""
    normalizer = math.exp(log_normalizer)
    losses = []
    for i, row in enumerate(query):
        kept = noise if masked is None else noise[~masked[i]]
        share = len(kept) / num_samples
        at_positive = (row @ positive[i] / temperature).exp() / normalizer
        at_noise = (kept @ row / temperature).exp() / normalizer
        own = at_positive / (at_positive + share)
        losses.append(-own.log() - (share / (at_noise + share)).log().sum())
    return torch.stack(losses).mean()


def plain_poly_view(
    views: Sequence[Tensor],
    temperature: Tensor,
    *,
    mean: str,
    ids: Tensor | None = None,
    own: Sequence[int] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute each probability by itself: of another view of the row's sample among the views of other samples."""
    num_samples, rows = len(views[0]), torch.cat(list(views))
    logits = rows @ rows.T / temperature
    ids = torch.arange(num_samples) if ids is None else ids
    is_negative = (ids[:, None] != ids).repeat(len(views), len(views))
    losses = []
    for row in range(len(rows)) if own is None else own:
        positives = [row % num_samples + view * num_samples for view in range(len(views))]
        log_p = torch.stack(
            [
                torch.cat([logits[row, [column]], logits[row][is_negative[row]]]).log_softmax(0)[0]
                for column in positives
                if column != row
            ]
        )
        log_mean = log_p.mean() if mean == "geometric" else log_p.exp().mean().log()
        losses.append(-log_mean)
    return weighted_mean(torch.stack(losses), None if weight is None else weight.repeat(len(views)))


def plain_nnclr(
    prediction: Tensor,
    projection: Tensor,
    support: Tensor,
    temperature: Tensor | float,
    *,
    ids: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the loss as in the paper: the nearest row of the support set among all predictions.

    Without a support set, the projection is its own neighbor.
    """
    neighbor = projection
    if len(support):
        cosine = F.normalize(projection, dim=1) @ F.normalize(support, dim=1).T
        neighbor = support[cosine.argmax(1)]
    own = torch.arange(len(prediction))
    ids = own if ids is None else ids
    masked = (ids[:, None] == ids) & (own[:, None] != own)
    logits = neighbor.detach() @ prediction.T / temperature
    losses = F.cross_entropy(logits.masked_fill(masked, -torch.inf), own, reduction="none")
    return weighted_mean(losses, weight)


def plain_supcon(
    rows: Tensor,
    label: Tensor,
    temperature: Tensor,
    *,
    own: Sequence[int] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute equation 2 of the paper, row by row; ``own`` selects the rows of one worker."""
    losses = []
    for i in range(len(rows)) if own is None else own:
        others = [j for j in range(len(rows)) if j != i]
        logits = (rows @ rows[i] / temperature)[others]
        positive = torch.tensor([bool(label[j] == label[i]) for j in others])
        losses.append(-(logits[positive] - logits.exp().sum().log()).sum() / positive.sum())
    return weighted_mean(torch.stack(losses), weight)


def plain_distillation(
    queries: Tensor,
    keys: Tensor,
    temperature: Tensor,
    teacher: tuple[Tensor, Tensor],
    *,
    teacher_temperature: float,
    teacher_keys: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the cross-entropy of the teacher's and the student's softmax, from queries to keys and back."""
    of_rows, of_columns = (rows.to(queries) for rows in teacher)
    of_teacher, of_student = of_rows @ of_columns.T / teacher_temperature, queries @ keys.T / temperature
    back = of_student.T
    if teacher_keys:
        of_student, back = queries @ of_columns.T / temperature, keys @ of_rows.T / temperature
    ways = (of_teacher, of_student), (of_teacher.T, back)
    rows = [-(right.softmax(1) * logits.log_softmax(1)).sum(1) for right, logits in ways]
    return weighted_mean((rows[0] + rows[1]) / 2, weight)


def plain_siglip(
    queries: Tensor,
    keys: Tensor,
    temperature: Tensor,
    bias: Tensor,
    *,
    own: slice = slice(None),
    pair_ids: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the loss as in the paper: a label of 1 or -1 for every query and key."""
    labels = 2 * torch.eye(len(keys), dtype=queries.dtype) - 1
    losses = -F.logsigmoid(labels * (queries @ keys.T / temperature + bias))
    if pair_ids is not None:
        false = are_known(*pair_ids, pair_ids) & (labels < 0)
        losses = losses.masked_fill(false, 0.0)
    return weighted_mean(losses[own].sum(1), weight)
