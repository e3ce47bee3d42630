"""Communication, computation and memory of a step as formulas: docs/scale.md sets them beside measurements.

Bytes are per worker and step, one way unless stated otherwise. ``itemsize`` is the bytes
of a number on its way: 4 for float32, 2 for float16.
"""

from typing import NamedTuple

_ID = 8  # bytes of an id, a step or a slot: all int64


class Payload(NamedTuple):
    """Bytes of the arrays in the calls of one step."""

    sent: int
    received: int


def gather_bytes(num_workers: int, batch_size: int, dim: int, *, itemsize: int = 4) -> float:
    """Return the bytes that a worker receives, and sends, to gather the rows of all workers."""
    return (num_workers - 1) / num_workers * batch_size * dim * itemsize


def gather_gradient_bytes(num_workers: int, batch_size: int, dim: int, *, scatters: bool) -> float:
    """Return the bytes of the gradient of gathered rows, each way.

    With nccl it is scattered as it is summed; with gloo all workers receive all of the sum.
    """
    return (1 if scatters else 2) * gather_bytes(num_workers, batch_size, dim)


def parameter_gradient_bytes(num_workers: int, num_parameters: int) -> float:
    """Return what averaging the gradients of parameters costs, each way: a ring's reduce and gather."""
    return 2 * (num_workers - 1) / num_workers * num_parameters * 4


def loss_flop(num_workers: int, batch_size: int, dim: int) -> float:
    """Return a worker's share of the products of a loss over all pairs: logits and both gradients."""
    return 6 * batch_size / num_workers * batch_size * dim


def queue_payload(local_batch: int, dim: int, *, itemsize: int) -> Payload:
    """Return the bytes of a worker's part of a batch: rows with ids and steps. Rank 0 sends all parts."""
    return Payload(sent=local_batch * (dim * itemsize + 2 * _ID), received=0)


def bank_payload(batch_size: int, num_negatives: int, dim: int, *, itemsize: int) -> Payload:
    """Return the bytes of a step's calls to all shards: each row is read and written once for all workers.

    Sent: the slots asked for, and the updates with their ids. Received: rows with their steps.
    """
    asked = batch_size + num_negatives
    row = dim * itemsize + _ID
    return Payload(sent=asked * _ID + batch_size * row, received=asked * row)


def group_bytes(num_workers: int, batch_size: int, num_negatives: int, dim: int, *, itemsize: int) -> float:
    """Return what a worker receives from the others for a step: slots, new rows, own rows and drawn rows.

    Slots, new rows with their ids, and drawn rows with their steps are gathered. Own rows, and a share of the drawn
    ones, come from the workers that called the shards, which may be this one.
    """
    row = dim * itemsize + _ID
    gathered = batch_size * (_ID + row) + num_negatives * row
    return (num_workers - 1) / num_workers * gathered + (batch_size + num_negatives) / num_workers * row


def bank_memory(num_rows: int, dim: int, *, itemsize: int) -> int:
    """Return the memory of a memory bank, all shards together: rows, and an id and a step each."""
    return num_rows * (dim * itemsize + 2 * _ID)
