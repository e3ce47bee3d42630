"""Tables of a bank's answers, one fact per line for grep."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from raycl.display import format_value, text_table
from raycl.negatives.search import Neighbors
from raycl.negatives.spec import BankSpec
from raycl.negatives.stats import BankStats
from raycl.negatives.store import Negatives

_BAR = 40  # characters of the longest bar
_NUM_SHOWN = 4  # values of an embedding


def print_specs(specs: Mapping[str, BankSpec | None]) -> None:
    """Print one line per bank: kind, size and run."""
    rows = [
        (name, each.kind, str(each.capacity), str(each.dim), each.dtype, str(each.num_shards), each.output)
        if each
        else (name, "does not answer", *[""] * 5)
        for name, each in specs.items()
    ]
    print_table(("bank", "kind", "rows", "dim", "dtype", "shards", "run"), rows)


def print_stats(stats: BankStats) -> None:
    """Print a bank's statistics, its shards and a histogram of the rows' ages."""
    table = stats.to_table()
    print_table(
        (), [("bank", stats.name), *((name, format_value(value)) for name, value in table.facts.items())]
    )
    print_table(table.columns, table.rows)
    if stats.age_histogram:
        most = max(rows for _, rows in stats.age_histogram)
        ages = [
            (f"below {bound:,}", rows, "#" * -(-_BAR * rows // most)) for bound, rows in stats.age_histogram
        ]
        print_table(("age in steps", "rows", ""), ages)


def print_neighbors(found: Neighbors) -> None:
    """Print one line per neighbor, nearest first."""
    rows = zip(
        found.sample_id.tolist(), map("{:.4f}".format, found.similarity), found.step.tolist(), strict=True
    )
    print_table(
        ("sample_id", "similarity", "step"), [(str(id_), near, str(step)) for id_, near, step in rows]
    )


def print_rows(found: Negatives) -> None:
    """Print one line per row: sample, step, norm and the first values."""
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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under the column names, numbers right-aligned."""
    print(text_table(columns, list(rows)))
