"""Moving averages of partition functions, by their logarithms (SogCLR: Yuan et al., 2022)."""

import numpy as np


def fill_unknown(rows: np.ndarray, first_slot: int, seed: int) -> None:
    """Set all rows to the logarithm of 0: no estimate."""
    rows[:] = -np.inf


def log_mean(owners: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each owner [n] once, with log(mean(exp(logs))) of its rows [n, num_sides].

    Rows are added in ascending order, so the result does not depend on their order.
    """
    distinct, index, count = np.unique(owners, return_inverse=True, return_counts=True)
    if len(distinct) == len(owners):
        return owners, logs
    firsts = np.cumsum(count) - count
    columns = [column[np.lexsort((column, index))] for column in logs.astype(np.float64).T]
    sums = np.stack([np.logaddexp.reduceat(column, firsts) for column in columns], axis=1)
    return distinct, (sums - np.log(count)[:, None]).astype(np.float32)


def moved_log(before: np.ndarray, logs: np.ndarray, momentum: float) -> np.ndarray:
    """Return log(momentum * u + (1 - momentum) * new u), given log u (-inf: no estimate) and the new log u."""
    if momentum == 0:
        return logs
    old, new = before.astype(np.float64) + np.log(momentum), logs.astype(np.float64) + np.log1p(-momentum)
    return np.where(np.isneginf(before), logs, np.logaddexp(old, new)).astype(np.float32)
