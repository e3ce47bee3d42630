"""How queries slow training down: steps per second of a run whose bank answers queries.

    python benchmarks/bank_query.py NAME [--address HOST:PORT] [--spells 3] [--json FILE]

While ``raycl train`` runs in another shell, periods of 15 s without queries alternate with periods of two queries
every half second (``stats`` and the ten nearest rows of a random vector).
"""

import time

import numpy as np
from measuring import add_times, alternate, make_parser, report, table

import raycl
from raycl.negatives.bank import Bank

PERIOD_S, PAUSE_S = 15.0, 0.5


def query(bank: Bank) -> None:
    bank.stats()
    bank.nearest(np.random.default_rng().standard_normal(bank.spec.dim, np.float32), k=10)


def pace(bank: Bank, *, is_asked: bool) -> dict[str, float]:
    """Return the run's steps per second over a period, and the milliseconds of a pair of queries."""
    first, since, spent_s, number = bank.stats().newest_step or 0, time.perf_counter(), 0.0, 0
    while time.perf_counter() - since < PERIOD_S:
        if is_asked:
            began = time.perf_counter()
            query(bank)
            spent_s, number = spent_s + time.perf_counter() - began, number + 1
        time.sleep(PAUSE_S)
    steps = (bank.stats().newest_step or 0) - first
    return {
        "steps_per_second": steps / (time.perf_counter() - since),
        "query_ms": 1e3 * spent_s / max(number, 1),
    }


def main() -> None:
    parser = make_parser(__doc__, address=None, spells=3)
    parser.add_argument("name", help="the bank of a live run")
    options = parser.parse_args()
    since = time.perf_counter()
    bank = raycl.connect_bank(options.name, options.address)
    print(f"connected in {time.perf_counter() - since:.2f} s")
    sides = {"quiet": lambda: pace(bank, is_asked=False), "asked": lambda: pace(bank, is_asked=True)}
    lines = alternate(sides, options.spells)
    add_times(lines, lines[0], "steps_per_second")
    titles = {
        "steps_per_second": "steps/s",
        "steps_per_second_times": "of quiet",
        "query_ms": "two queries, ms",
    }
    report(options, lines, table(lines, side="", **titles))


if __name__ == "__main__":
    main()
