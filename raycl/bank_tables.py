"""What a bank answers, for people: plain tables, a fact a line, so that grep finds them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raycl.negatives.bank_plan import BankPlan
from raycl.negatives.bank_stats import BankStats
from raycl.negatives.questions import Neighbors
from raycl.negatives.store import Negatives

_BAR = 40  # characters of the longest bar
_NUM_SHOWN = 4  # numbers of an embedding
_LOG_WIDTH = 1_000  # a log or a pipe has no edge to wrap at


def print_plans(plans: Mapping[str, BankPlan | None]) -> None:
    """Print a line a bank: what it is and whose."""
    rows = [
        (name, each.kind, str(each.capacity), str(each.dim), each.dtype, str(each.num_shards), each.output)
        if each
        else (name, "does not answer", *[""] * 5)
        for name, each in plans.items()
    ]
    print_table(("bank", "kind", "rows", "dim", "dtype", "shards", "run"), rows)


def print_stats(stats: BankStats) -> None:
    """Print the facts of a bank, then its shards, then how old its rows are."""
    print_table(None, [(name, _text(value)) for name, value in _facts(stats).items()])
    shards = [
        (
            shard,
            each.node_ip,
            each.node_id[:12],
            str(each.pid),
            each.rows,
            _size(each.num_bytes),
            each.restarts,
        )
        for shard, each in enumerate(stats.shards)
    ]
    print_table(("shard", "node", "node id", "pid", "rows", "memory", "restarts"), shards)
    if stats.age_histogram:
        most = max(rows for _, rows in stats.age_histogram)
        ages = [
            (f"below {bound:,}", rows, "#" * -(-_BAR * rows // most)) for bound, rows in stats.age_histogram
        ]
        print_table(("age in steps", "rows", ""), ages)


def print_neighbors(found: Neighbors) -> None:
    """Print a line a neighbor, nearest first."""
    rows = zip(
        found.sample_id.tolist(), map("{:.4f}".format, found.similarity), found.step.tolist(), strict=True
    )
    print_table(
        ("sample_id", "similarity", "step"), [(str(id_), near, str(step)) for id_, near, step in rows]
    )


def print_rows(found: Negatives) -> None:
    """Print a line a row: its sample, the step that wrote it, its length and its first numbers."""
    lengths = np.linalg.norm(found.rows.astype(np.float32), axis=1)
    rows = [
        (
            str(id_),
            str(step) if step >= 0 else "never",
            f"{length:.4f}",
            " ".join(f"{value:.4f}" for value in row[:_NUM_SHOWN])
            + (" ..." if len(row) > _NUM_SHOWN else ""),
        )
        for id_, step, length, row in zip(found.sample_id, found.step, lengths, found.rows, strict=True)
    ]
    print_table(("sample_id", "step", "norm", "embedding"), rows)


def print_table(columns: Sequence[str] | None, rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their columns' names; numbers to the right."""
    rows = list(rows)
    table = Table(box=None, show_header=columns is not None, pad_edge=False, padding=(0, 2, 0, 0))
    kinds = rows[0] if rows else columns or ()
    for name, example in zip(columns or [""] * len(kinds), kinds, strict=True):
        table.add_column(Text(name), justify="right" if isinstance(example, int) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_text(value)) for value in row))
    console = Console(highlight=False)
    with console.capture() as printed:
        console.print(table, width=None if console.is_terminal else _LOG_WIDTH, crop=False)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _facts(stats: BankStats) -> dict[str, object]:
    return {
        "bank": stats.name,
        "kind": stats.kind,
        "run": stats.output,
        "rows": stats.rows,
        "filled": stats.filled,
        "dim": stats.dim,
        "dtype": stats.dtype,
        "memory": _size(stats.num_bytes),
        "newest step": _or_none(stats.newest_step, ",d"),
        "mean age": _or_none(stats.age_mean, ",.1f"),
        "oldest age": _or_none(stats.age_max, ",d"),
        "mean norm": _or_none(stats.norm_mean, ".4f"),
        "least norm": _or_none(stats.norm_min, ".4f"),
        "largest norm": _or_none(stats.norm_max, ".4f"),
        "puts": f"{stats.puts:,} ({stats.puts_per_second:,.1f} a second)",
        "reads": f"{stats.reads:,} ({stats.reads_per_second:,.1f} a second)",
        "restarts": stats.restarts,
    }


def _or_none(value: float | None, form: str) -> str:
    return "none yet" if value is None else format(value, form)


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(num_bytes: int) -> str:
    unit, divisor = ("MiB", 2**20) if num_bytes >= 2**20 else ("KiB", 2**10)
    return f"{num_bytes / divisor:,.1f} {unit}"
