"""Communication and computation of a training step with 1, 2 and 4 workers, beside the formulas of ``scale_model.py``.

    python benchmarks/scale_training.py [--workers 1 2 4] [--batch-size 4096] [--json FILE]

Processes that are joined by gloo over the loopback network, a thread each, without raycl's shared
memory, so that the kernel counts network traffic: bytes of all connections, each way, by
the workers' median. Gathered are float32 rows, in a batch of ``--batch-size`` over all workers; the
averaged gradients are of one layer. The loss is InfoNCE over gathered keys, its value and both
gradients, in CPU time.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import Line, alternate, in_workers, make_parser, report, table, timed
from scale_clients import tcp_bytes
from scale_model import gather_bytes, gather_gradient_bytes, loss_flop, parameter_gradient_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from raycl.distributed import gather, rank
from raycl.distributed.ddp import average_gradients
from raycl.losses import info_nce

WIDTH, DIM = 1_536, 128
REPEATS = 5
GATHER, ITS_GRADIENT, PARAMETERS = "gather", "gather's gradient", "parameters' gradient"


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


def measure_worker(number: int, num_workers: int, batch_size: int, folder: str) -> dict[str, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=num_workers)
    torch.manual_seed(number)
    rows = F.normalize(torch.randn(batch_size // num_workers, DIM), dim=1).requires_grad_()
    gathered = gather(rows)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    averaged, one = average_gradients(layer, torch.device("cpu")), torch.ones(1, WIDTH)
    found = {
        GATHER: sent_by(lambda: gather(rows)),
        ITS_GRADIENT: sent_by(lambda: gathered.sum().backward(retain_graph=True)),
        PARAMETERS: sent_by(lambda: averaged(one).sum().backward()),
        "loss_ms": loss_ms(rows, gathered),
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def loss_ms(rows: Tensor, gathered: Tensor) -> float:
    """Return the CPU milliseconds of the loss of this worker's rows among all keys."""
    query, keys = (each.detach().clone().requires_grad_() for each in (rows, gathered))
    offset = rank() * len(query)

    def step() -> None:
        own = keys[offset : offset + len(query)]
        info_nce(query, own, temperature=0.1, gathered_key=keys, offset=offset).backward()

    return alternate({"loss": timed(step)}, REPEATS)[0]["cpu_ms"]["median"]


def compare(num_workers: int, batch_size: int) -> list[Line]:
    """Return what was measured with so many workers, and the formulas' line."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_workers(measure_worker, num_workers, num_workers, batch_size, folder)
    measured = {name: statistics.median(each[name] for each in found) for name in found[0]}
    gflop = loss_flop(num_workers, batch_size, DIM) / 1e9
    model = {
        GATHER: gather_bytes(num_workers, batch_size, DIM),
        ITS_GRADIENT: gather_gradient_bytes(num_workers, batch_size, DIM, scatters=False),
        PARAMETERS: parameter_gradient_bytes(num_workers, WIDTH**2),
        "gflop": gflop,
    }
    measured["gflop_per_s"] = gflop / (measured["loss_ms"] / 1e3)
    sides = {"measured": measured, "model": model}
    return [{"workers": num_workers, "side": side} | figures for side, figures in sides.items()]


def main() -> None:
    options = make_parser(__doc__, workers=[1, 2, 4], batch_size=4_096).parse_args()
    lines = [line for number in options.workers for line in compare(number, options.batch_size)]
    bytes_of = {name: f"{name}, bytes" for name in (GATHER, ITS_GRADIENT, PARAMETERS)}
    titles = {"loss_ms": "loss, ms", "gflop": "GFLOP", "gflop_per_s": "GFLOP/s"}
    report(options, lines, table(lines, workers="W", side="", **bytes_of, **titles))


if __name__ == "__main__":
    main()
