"""Whether questions slow training down: steps a second of a run whose bank is asked now and then.

    python benchmarks/ask.py NAME [--address HOST:PORT]

While ``raycl train`` goes on in another shell, spells of silence and of two questions every half
second (``stats`` and the ten nearest of a random vector) alternate.
"""

import argparse
import statistics
import time

import numpy as np

import raycl
from raycl.negatives.bank import Bank

SPELL_S, NAP_S = 15.0, 0.5


def ask(bank: Bank) -> float:
    """Ask twice; return the seconds that it took."""
    since = time.perf_counter()
    bank.stats()
    bank.nearest(np.random.default_rng().standard_normal(bank.spec.dim, np.float32), k=10)
    return time.perf_counter() - since


def steps_a_second(bank: Bank, *, asking: bool) -> tuple[float, list[float]]:
    """Let a spell go by; return the run's pace and how long the questions took."""
    first, since, taken = bank.stats().newest_step or 0, time.perf_counter(), []
    while time.perf_counter() - since < SPELL_S:
        if asking:
            taken.append(ask(bank))
        time.sleep(NAP_S)
    last = bank.stats().newest_step or 0
    return (last - first) / (time.perf_counter() - since), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="the bank of a run that goes on")
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
            pace, seconds = steps_a_second(bank, asking=asking)
            paces[asking].append(pace)
            taken += seconds
            print(f"{'asked' if asking else 'quiet'}  {pace:.2f} steps/s")
    quiet, asked = (statistics.median(paces[asking]) for asking in (False, True))
    print(f"asked / quiet {asked / quiet:.3f}; two questions took {1e3 * statistics.median(taken):.0f} ms")


if __name__ == "__main__":
    main()
