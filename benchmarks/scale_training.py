"""Measure communication and computation of a training step with 1, 2 and 4 workers, beside the formulas of ``scale_model.py``.

    python benchmarks/scale_training.py [--json scale_training.json]

Processes that are joined by gloo over the loopback network, a thread each, without raycl's shared
memory, so that the kernel counts network traffic: bytes of all connections, each way, by
the workers' median. Gathered are float32 rows, in a batch of ``--batch-size`` over all workers; the
averaged gradients are of one layer. The loss is InfoNCE over gathered keys, its value and both
gradients, in CPU time.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, make_parser, write_json
from scale_clients import tcp_bytes
from scale_model import gather_bytes, gather_gradient_bytes, loss_flop, parameter_gradient_bytes
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F

from raycl.distributed import gather, rank
from raycl.distributed.ddp import average_gradients
from raycl.losses import info_nce

WIDTH, DIM = 1_536, 128
REPEATS = 5


def sent_by(call: Callable[[], object]) -> float:
    """Return the bytes that this process sends for one call."""
    call()  # connections are made at the first one
    settle()
    before = tcp_bytes()[0]
    for _ in range(REPEATS):
        call()
    settle()
    return (tcp_bytes()[0] - before) / REPEATS


def settle() -> None:
    """Wait until all sent bytes are acknowledged."""
    dist.barrier()
    time.sleep(0.2)


def measure_worker(number: int, num_workers: int, batch_size: int, folder: str) -> None:
    """Measure in one worker, and leave a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(folder, "meeting").as_uri(), rank=number, world_size=num_workers
    )
    torch.manual_seed(number)
    rows = F.normalize(torch.randn(batch_size // num_workers, DIM), dim=1).requires_grad_()
    gathered = gather(rows)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    averaged, one = average_gradients(layer, torch.device("cpu")), torch.ones(1, WIDTH)
    found = {
        "gather": sent_by(lambda: gather(rows)),
        "gather's gradient": sent_by(lambda: gathered.sum().backward(retain_graph=True)),
        "parameters' gradient": sent_by(lambda: averaged(one).sum().backward()),
        "loss_ms": loss_ms(rows, gathered),
    }
    Path(folder, f"{number}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def loss_ms(rows: Tensor, gathered: Tensor) -> float:
    """Return the CPU milliseconds of the loss of this worker's rows among all keys."""
    query, keys = (each.detach().clone().requires_grad_() for each in (rows, gathered))
    offset = rank() * len(query)
    taken = []
    for _ in range(REPEATS):
        since = time.process_time()
        own = keys[offset : offset + len(query)]
        info_nce(query, own, temperature=0.1, gathered_key=keys, offset=offset).backward()
        taken.append(1e3 * (time.process_time() - since))
    return statistics.median(taken)


def measure(num_workers: int, batch_size: int) -> dict[str, Any]:
    """Measure with this many workers."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure_worker, (num_workers, batch_size, folder), nprocs=num_workers)
        found = [json.loads(Path(folder, f"{each}.json").read_text()) for each in range(num_workers)]
    model = {
        "gather": gather_bytes(num_workers, batch_size, DIM),
        "gather's gradient": gather_gradient_bytes(num_workers, batch_size, DIM, scatters=False),
        "parameters' gradient": parameter_gradient_bytes(num_workers, WIDTH**2),
    }
    measured = {name: statistics.median(each[name] for each in found) for name in found[0]}
    gflop = loss_flop(num_workers, batch_size, DIM) / 1e9
    rate = gflop / (measured["loss_ms"] / 1e3)
    return {
        "workers": num_workers,
        "measured": measured,
        "model": model | {"loss_gflop": gflop},
        "gflop_per_s": rate,
    }


def show(result: dict[str, Any]) -> None:
    measured, model = result["measured"], result["model"]
    cells = [
        f"{measured[name] / 1e6:8.3f} {model[name] / 1e6:8.3f}"
        for name in ("gather", "gather's gradient", "parameters' gradient")
    ]
    loss = f"{measured['loss_ms']:8.1f} {model['loss_gflop']:7.2f} {result['gflop_per_s']:6.1f}"
    print(f"{result['workers']:>3}  " + "   ".join(cells) + "   " + loss, flush=True)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-size", type=int, default=4_096)
    arguments = parser.parse_args()
    print(
        "  W  gather, MB   model   its gradient   model   parameters', MB   model   loss, ms  GFLOP  GFLOP/s"
    )
    results = []
    for num_workers in arguments.workers:
        results.append(measure(num_workers, arguments.batch_size))
        show(results[-1])
    content = {"machine": describe_machine(), "batch_size": arguments.batch_size, "results": results}
    write_json(arguments.json, content)


if __name__ == "__main__":
    main()
