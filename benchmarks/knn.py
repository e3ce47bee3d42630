"""The weighted kNN beside scikit-learn's: time, and peak memory beyond the inputs.

    python benchmarks/knn.py [--large] [--threads 1] [--json FILE]

10,000 queries of 128 numbers among 50,000 rows around 100 centers; ``--large`` also has raycl's among 1,000,000.
Each line is a process of its own, so that its peak memory is its own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import Line, apart, cost, make_parser, report, table
from torch import Tensor

from raycl.evaluation.knn import knn_predict

NUM_QUERIES, DIM, NUM_CLASSES = 10_000, 128, 100
K, TEMPERATURE = 200, 0.07
ROWS, MANY_ROWS = 50_000, 1_000_000


def clusters(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw rows around the centers, [num_rows, 128], and their classes."""
    centers = torch.randn(NUM_CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(NUM_CLASSES, (num_rows,), generator=generator)
    rows = torch.randn(num_rows, DIM, generator=generator).mul_(3)
    for part in range(0, num_rows, 10_000):  # in parts, not to raise the peak by a second copy
        rows[part : part + 10_000] += centers[label[part : part + 10_000]]
    return rows, label


def raycl_predict(query: Tensor, bank: Tensor, label: Tensor) -> Tensor:
    return knn_predict(query, bank, label, k=K, temperature=TEMPERATURE)


def sklearn_predict(query: Tensor, bank: Tensor, label: Tensor) -> Tensor:
    """Predict by scikit-learn: the same vote, from its cosine distance."""
    from sklearn.neighbors import KNeighborsClassifier  # the other process must not carry it

    def weights(distance: np.ndarray) -> np.ndarray:
        return np.exp((1 - distance) / TEMPERATURE)

    classifier: Any = KNeighborsClassifier  # its stubs know no callable weights
    model = classifier(K, metric="cosine", algorithm="brute", weights=weights)
    return torch.from_numpy(model.fit(bank.numpy(), label.numpy()).predict(query.numpy()))


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "raycl": raycl_predict,
    "scikit-learn": sklearn_predict,
}


def vote(side: str, num_rows: int, threads: int) -> Line:
    """Vote once, after imports and thread pools are there."""
    torch.set_num_threads(threads)
    (query, query_label), (bank, label) = clusters(NUM_QUERIES, seed=1), clusters(num_rows, seed=2)
    predict, predicted = SIDES[side], []
    predict(query[:300], bank[:2_000], label[:2_000])
    found = cost(lambda: predicted.append(predict(query, bank, label)))
    top1 = (predicted[0] == query_label).double().mean().item()
    return {"side": side, "rows": num_rows} | found | {"top1": top1}


def main() -> None:
    options = make_parser(__doc__, large=False, threads=1).parse_args()
    cases = [*((side, ROWS) for side in SIDES), *([("raycl", MANY_ROWS)] if options.large else [])]
    threads = options.threads
    lines = [apart(vote, side, rows, threads, num_threads=threads) for side, rows in cases]
    titles = {"rows": "rows", "wall_s": "wall s", "cpu_s": "CPU s", "memory_mb": "MB", "top1": "top-1"}
    report(options, lines, table(lines, side="", **titles))


if __name__ == "__main__":
    main()
