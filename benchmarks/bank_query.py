"""Measure how queries slow training down: steps per second of a run whose bank answers queries.

    python benchmarks/bank_query.py NAME [--address HOST:PORT]

While ``raycl train`` runs in another shell, periods without queries alternate with periods of two queries
every half second (``stats`` and the ten nearest rows of a random vector).
"""

import argparse
import statistics
import time

import numpy as np

import raycl
from raycl.negatives.bank import Bank

PERIOD_S, PAUSE_S = 15.0, 0.5


def query(bank: Bank) -> float:
    """Send two queries; return their seconds."""
    since = time.perf_counter()
    bank.stats()
    bank.nearest(np.random.default_rng().standard_normal(bank.spec.dim, np.float32), k=10)
    return time.perf_counter() - since


def steps_per_second(bank: Bank, *, asking: bool) -> tuple[float, list[float]]:
    """Return the run's steps per second over a period, and the seconds of its queries."""
    first, since, taken = bank.stats().newest_step or 0, time.perf_counter(), []
    while time.perf_counter() - since < PERIOD_S:
        if asking:
            taken.append(query(bank))
        time.sleep(PAUSE_S)
    last = bank.stats().newest_step or 0
    return (last - first) / (time.perf_counter() - since), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="the bank of a live run")
    parser.add_argument("--address")
    parser.add_argument("--spells", type=int, default=3, help="of each kind")
    arguments = parser.parse_args()
    since = time.perf_counter()
    bank = raycl.connect_bank(arguments.name, arguments.address)
    print(f"connected in {time.perf_counter() - since:.2f} s")
    paces: dict[bool, list[float]] = {False: [], True: []}
    taken: list[float] = []
    for _ in range(arguments.spells):
        for asking in paces:
            pace, seconds = steps_per_second(bank, asking=asking)
            paces[asking].append(pace)
            taken += seconds
            print(f"{'asked' if asking else 'quiet'}  {pace:.2f} steps/s")
    quiet, asked = (statistics.median(paces[asking]) for asking in (False, True))
    print(f"asked / quiet {asked / quiet:.3f}; two queries took {1e3 * statistics.median(taken):.0f} ms")


if __name__ == "__main__":
    main()
