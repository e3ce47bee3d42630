"""Time and peak memory of the weighted kNN, beside scikit-learn's.

``python benchmarks/knn.py [--large] [--threads N] [--json FILE]``. Each row runs in a process of
its own, so that its peak memory is its own.
"""

import argparse
import json
import resource
import time
from typing import Any

import numpy as np
import torch
from measuring import make_parser, run_apart, write_json

from raycl.evaluation import knn_predict

NUM_QUERIES, DIM, NUM_CLASSES = 10_000, 128, 100
K, TEMPERATURE = 200, 0.07
BANK, LARGE_BANK = 50_000, 1_000_000


def clusters(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows around 100 centers, [num_rows, 128], and their classes."""
    centers = torch.randn(NUM_CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(NUM_CLASSES, (num_rows,), generator=generator)
    rows = torch.randn(num_rows, DIM, generator=generator).mul_(3)
    for part in range(0, num_rows, 10_000):  # in parts, not to raise the peak by a second copy
        rows[part : part + 10_000] += centers[label[part : part + 10_000]]
    return rows, label


def raycl_predict(query: torch.Tensor, bank: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Predict by raycl."""
    return knn_predict(query, bank, label, k=K, temperature=TEMPERATURE)


def sklearn_predict(query: torch.Tensor, bank: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Predict by scikit-learn: the same vote, from its cosine distance."""
    from sklearn.neighbors import KNeighborsClassifier  # the other process must not carry it

    def weights(distance: np.ndarray) -> np.ndarray:
        return np.exp((1 - distance) / TEMPERATURE)

    classifier: Any = KNeighborsClassifier  # its stubs know no callable weights
    model = classifier(K, metric="cosine", algorithm="brute", weights=weights)
    return torch.from_numpy(model.fit(bank.numpy(), label.numpy()).predict(query.numpy()))


METHODS = {"raycl": raycl_predict, "scikit-learn": sklearn_predict}


def peak_mb() -> float:
    """Return the most memory this process ever held, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024


def measure(method: str, num_rows: int, threads: int) -> dict[str, Any]:
    """Run one method once in this process; seconds, and MB beyond the inputs."""
    torch.set_num_threads(threads)
    query, query_label = clusters(NUM_QUERIES, seed=1)
    bank, label = clusters(num_rows, seed=2)
    METHODS[method](query[:300], bank[:2_000], label[:2_000])  # imports and thread pools
    before, start, cpu = peak_mb(), time.perf_counter(), time.process_time()
    predicted = METHODS[method](query, bank, label)
    return {
        "method": method,
        "num_rows": num_rows,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "extra_mb": peak_mb() - before,
        "top1": (predicted == query_label).double().mean().item(),
    }


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--large", action="store_true", help="also a bank of 1,000,000 rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        method, num_rows = arguments.one
        print(json.dumps(measure(method, int(num_rows), arguments.threads)))
        return
    cases = [("raycl", BANK), ("scikit-learn", BANK)]
    cases += [("raycl", LARGE_BANK)] if arguments.large else []
    print(f"{NUM_QUERIES} queries x {DIM} dims, k = {K}, {arguments.threads} thread(s)")
    print(f"{'method':14}{'bank rows':>10}{'wall s':>9}{'cpu s':>9}{'extra MB':>10}{'top-1':>8}")
    results: list[dict[str, Any]] = []
    for method, num_rows in cases:
        threads = arguments.threads
        row = run_apart(__file__, "--one", method, num_rows, "--threads", threads, num_threads=threads)
        results.append(row)
        print(
            f"{method:14}{num_rows:>10}{row['seconds']:>9.2f}{row['cpu_seconds']:>9.2f}"
            f"{row['extra_mb']:>10.0f}{row['top1']:>8.4f}",
            flush=True,
        )
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
