"""Communication between workers: collectives, shared memory on one machine, DDP, and the ring of losses."""

from raycl.distributed.collectives import (
    RingTransfer,
    RowExchange,
    all_agree,
    all_sum,
    average_,
    check_equal,
    exceeds_gather_limit,
    gather,
    gather_detached,
    gather_uneven,
    mean_over_workers,
    num_workers,
    rank,
    shares_memory,
    use_shared_memory,
    visit_all,
)

__all__ = [
    "RingTransfer",
    "RowExchange",
    "all_agree",
    "all_sum",
    "average_",
    "check_equal",
    "exceeds_gather_limit",
    "gather",
    "gather_detached",
    "gather_uneven",
    "mean_over_workers",
    "num_workers",
    "rank",
    "shares_memory",
    "use_shared_memory",
    "visit_all",
]
