"""The benchmarks that ``run.py`` runs, in its order, with the aims of the project where there are any.

Not among them are ``gpu.py``, which needs a GPU, ``scale.py``, ``autoscale.py`` and ``soak.py``, which have
documents of their own, and ``monitor.py`` and ``bank_query.py``, which have no peer and write no JSON.
"""

from collections.abc import Callable
from typing import Any

from comparisons import Benchmark, Comparison, Place
from result_tables import bank_table, chunk_table, growth_table, step_table

IMAGES, PAIRS = "{data}/cifar10/train.parquet", "{data}/medquad/train.parquet"
# The introduction of each section, in the page's order.
SECTIONS = {
    "Whole training": (
        "Two workers with half of the cores each, batch size 256. Each side runs in its own processes, "
        "and the sides alternate. lightly runs with its transform and loss in plain "
        "`DistributedDataParallel` with a `DataLoader`; sentence-transformers with its own trainer. The "
        "encoder alone runs only forward and backward, in raycl's memory layout and with its allocator "
        "settings, an upper bound for any pipeline. `lightly in float32` in the rows of bfloat16 comes "
        "from another run."
    ),
    "Data path": (
        "Images per second of wall time, two views each, without an encoder. Held rows were decoded "
        "before the first epoch; streamed ones are read and decoded in each epoch. `own views` is a "
        "`DataLoader` that computes raycl's batched views in its workers."
    ),
    "Views": (
        "SimCLR's augmentation of decoded images, 96 pixels from 120 and 224 from 280, CPU time of one "
        "thread."
    ),
    "Losses and layers": (
        "Forward and backward, CPU time of one thread; memory is the peak above a fresh process. The "
        "queue: 256 queries, 65,536 keys of 128 numbers. BatchNorm: 256 x 64 x 32 x 32."
    ),
    "Batches in chunks": (
        "One step's gradient of 1,024 pairs in 16 chunks on one thread, CPU time and peak memory, with "
        "the given number of graphs kept from the first pass. A small ResNet at 32 pixels, with GroupNorm "
        "unless noted, and a transformer of four layers with dropout over 32 tokens. The aim is 1.30 "
        "times the time at a quarter of the memory."
    ),
    "Neighbors": (
        "The weighted vote for 10,000 queries of 128 numbers, CPU time of one thread; both have the same "
        "accuracy."
    ),
    "Bank": (
        "Training steps with the negatives in an actor, compared with the same steps in process: a queue "
        "of 65,536 keys, and a memory bank of 1,281,167 slots of which 4,096 are drawn, 128 numbers each; "
        "one worker with two threads, the small encoder in bfloat16, batch size 256. A step reads 4,352 "
        "rows and writes 256."
    ),
    "A step's time": (
        "Two workers with one thread each, batch size 256, float32, ResNet-18 for images, logged every "
        "tenth step; means of twenty steps after ten. *Messages* include the wait for the other worker. "
        "The aim for waiting for rows is less than 3% of a step."
    ),
    "Start": (
        "From the command to the first step of two workers, including the start of Ray; the aim is 15 s. "
        "raycl is compiled beforehand, like an installed package."
    ),
    "Growth": (
        "CPU seconds at the largest size of each, and memory above the process's. An epoch of rows is "
        "wall time on both cores. Powers are fitted over the upper half of the sizes."
    ),
    "Large batches": (
        "Steps in chunks, one worker with all cores; the losses in their own process, InfoNCE of 1,024 "
        "queries with both gradients."
    ),
    "Messages": "Bytes sent by one of four workers per call, compared with the formulas of [scale](scale.md).",
}
NAMES = {
    "encoder": "encoder alone",
    "gradcache": "GradCache",
    "lightly SimCLRTransform": "lightly",
    "model": "formula",
    "nn": "nn.BatchNorm",
    "open_clip": "open_clip's arithmetic",
    "plain": "plain torch",
    "process": "in process",
    "rows": "its rows",
    "wall": "whole step",
    "whole": "whole batch",
}
Side = Callable[[str], Place]  # where a side's number lies


def compare(what: str, unit: str, place: Side, own: str, *peers: str, **settings: Any) -> list[Comparison]:
    """Set one side beside others that have the same place in the result."""
    return [
        Comparison(what=what, unit=unit, own=place(own), other=place(peer), **named(peer) | settings)
        for peer in peers
    ]


def named(peer: str) -> dict[str, Any]:
    """Return the title of a peer, unless the settings give one."""
    return {"peer": NAMES.get(peer, peer)}


def rates(side: str) -> Place:
    return "rates", side


def loss(what: str, *peers: str, is_drawn: bool = True, **row: Any) -> list[Comparison]:
    """Compare the CPU time and the memory of a loss."""

    def cell(key: str) -> Side:
        return lambda name: ("cells", {"name": name} | row, key)

    return [
        *compare(what, "ms", cell("cpu_ms"), "raycl", *peers, is_drawn=is_drawn),
        *compare(f"{what}, memory", "MB", cell("memory_mb"), "raycl", *peers, is_drawn=is_drawn),
    ]


def batch_loss(kind: str, peer: str, *, dims: tuple[int, ...]) -> Benchmark:
    """Compare a loss of a batch with a peer's at two sizes, of which the smaller one is not drawn."""
    return Benchmark(
        name=kind,
        section="Losses and layers",
        script="loss.py",
        flags=f"--loss {kind} --sizes 1024 4096",
        quick="--quick",
        comparisons=[
            *(each for dim in dims for each in loss(f"{kind}, 4,096 x {dim}", peer, size=4_096, dim=dim)),
            *loss(f"{kind}, 1,024 x 128", peer, is_drawn=False, size=1_024, dim=128),
        ],
    )


def training(recipe: str, title: str) -> list[Benchmark]:
    """Train beside lightly; the aim of bfloat16 is over lightly in float32, as it comes."""
    settings: dict[str, Any] = {
        "section": "Whole training",
        "script": "train_step.py",
        "quick": "--batch-size 32 --steps 5 --repeats 1",
    }
    flags = f"--data {IMAGES} --recipe {recipe} --encoder resnet18"
    exact, rounded = (
        (f"{title}, ResNet-18{precision}", "samples/s", rates, "raycl") for precision in ("", ", bfloat16")
    )
    in_float32 = {"aim": 2.8, "other_of": recipe, "peer": "lightly in float32"}
    return [
        Benchmark(
            name=recipe,
            flags=flags,
            comparisons=[*compare(*exact, "lightly", aim=1.7), *compare(*exact, "encoder", aim=0.9)],
            **settings,
        ),
        Benchmark(
            name=f"{recipe}_bfloat16",
            flags=f"{flags} --precision bfloat16",
            comparisons=[
                *compare(*rounded, "lightly", **in_float32),
                *compare(*rounded, "lightly"),
                *compare(*rounded, "encoder", aim=0.9),
            ],
            **settings,
        ),
    ]


def towers(encoder: str, title: str) -> list[Comparison]:
    """Compare the rate and the memory of training two towers."""

    def line(key: str) -> Side:
        return lambda side: ("lines", {"encoder": encoder, "side": side}, key)

    sides = "raycl", "sentence-transformers"
    return [
        *compare(f"two_tower, {title}", "samples/s", line("samples_per_second"), *sides, aim=1.5),
        *compare(f"two_tower, {title}, workers' memory", "MB", line("workers_mb"), *sides),
    ]


def data_path(size: int, data: str, *, aim: float) -> Benchmark:
    """Compare images a second, of rows that are held and of rows that are streamed."""
    sides = {"held": f"data path, {size} pixels, held", "stream": f"data path, {size} pixels, streamed"}
    return Benchmark(
        name=f"data_path_{size}",
        section="Data path",
        script="data_path.py",
        flags=f"{data}--size {size}",
        quick="--seconds 2 --repeats 1",
        comparisons=[
            each
            for side, title in sides.items()
            for peer, hoped in (("lightly", aim), ("own views", 1.0))
            for each in compare(title, "images/s", rates, side, peer, aim=hoped)
        ],
    )


def views(size: int, *peers: str) -> list[Comparison]:
    def place(name: str) -> Place:
        return "rows", {"name": name, "size": size}, "us_per_view"

    return compare(f"a view of {size} pixels", "µs", place, "raycl", *peers)


def chunks(network: str) -> list[Comparison]:
    """Compare the CPU time and the memory of a batch in chunks."""

    def line(key: str) -> Side:
        return lambda side: ("lines", {"network": network, "side": side}, key)

    four, one, cached = (
        f"{network} in chunks, 4 kept",
        f"{network} in chunks, 1 kept",
        ("gradcache", "sentence-transformers"),
    )
    return [
        *compare(four, "s", line("cpu_s"), "raycl-4", "whole", aim=1 / 1.30),
        *compare(f"{four}, memory", "MB", line("memory_mb"), "raycl-4", "whole", aim=4.0),
        *compare(one, "s", line("cpu_s"), "raycl-1", *cached),
        *compare(f"{one}, memory", "MB", line("memory_mb"), "raycl-1", *cached),
    ]


def batchnorm(dtype: str) -> list[Comparison]:
    row = {"shape": [256, 64, 32, 32], "dtype": dtype, "layout": "channels_last"}
    return compare(
        f"synchronized BatchNorm, {dtype}", "ms", lambda kind: (row, f"{kind}_ms"), "synchronized", "nn"
    )


def neighbors(what: str, unit: str, key: str) -> list[Comparison]:
    def place(method: str) -> Place:
        return {"method": method, "num_rows": 50_000}, key

    return compare(what, unit, place, "raycl", "scikit-learn")


def bank(method: str, title: str) -> list[Comparison]:
    row = "results", {"method": method}
    step, memory = f"a step, {title} in an actor", f"{title}, the actor's memory"
    return [
        *compare(step, "ms", lambda where: (*row, f"{where}_step_ms"), "actor", "process"),
        *compare(memory, "MB", lambda what: (*row, "memory", f"{what}_mb"), "held", "rows", is_drawn=False),
    ]


def bank_rows(verb: str, what: str, **settings: Any) -> list[Comparison]:
    row = "results", {"method": "instance_discrimination"}, "rates"
    return compare(what, "µs", lambda side: (*row, f"{verb} {side}", "us"), "store", "numpy", **settings)


def wait(recipe: str) -> list[Comparison]:
    parts = "data", "wall"
    settings = {"aim": 1 / 0.03, "is_drawn": False}
    return compare(
        f"{recipe}, waiting for rows", "ms", lambda part: ("steps", recipe, part), *parts, **settings
    )


def messages(what: str) -> list[Comparison]:
    def place(side: str) -> Place:
        return "results", {"workers": 4}, side, what

    return compare(what, "bytes", place, "measured", "model", is_drawn=False)


SUITE = (
    *training("simclr", "SimCLR"),
    *training("moco_v2", "MoCo v2"),
    Benchmark(
        name="pairs",
        section="Whole training",
        script="pairs.py",
        flags=f"--data {PAIRS} --group focus",
        quick="--encoders bag_of_subwords --steps 20 --repeats 1",
        comparisons=[*towers("bag_of_subwords", "bag of subwords"), *towers("transformer", "transformer")],
    ),
    data_path(32, f"--data {IMAGES} ", aim=5.0),
    data_path(224, "", aim=2.5),  # photographs that it makes itself
    Benchmark(
        name="augment",
        section="Views",
        script="augment.py",
        quick="--quick",
        comparisons=[
            *views(32, "lightly SimCLRTransform", "torchvision v2, PIL"),
            *views(96, "lightly SimCLRTransform"),
            *views(224, "lightly SimCLRTransform", "torchvision v2, PIL"),
        ],
    ),
    Benchmark(
        name="nt_xent",
        section="Losses and layers",
        script="loss.py",
        flags="--sizes 1024 4096",
        quick="--quick",
        comparisons=[
            *loss("NT-Xent, 4,096 x 128", "lightly", "plain", size=4_096, dim=128),
            *loss("NT-Xent, 4,096 x 512", "lightly", size=4_096, dim=512),
            *loss("NT-Xent, 1,024 x 128", "lightly", is_drawn=False, size=1_024, dim=128),
        ],
    ),
    batch_loss("bidirectional", "open_clip", dims=(128, 512)),
    batch_loss("hinge", "plain", dims=(128,)),
    Benchmark(
        name="queue_loss",
        section="Losses and layers",
        script="loss.py",
        flags="--loss queue",
        quick="--quick",
        comparisons=loss("InfoNCE over a queue", "lightly", "plain", size=256, dim=128),
    ),
    Benchmark(
        name="batchnorm",
        section="Losses and layers",
        script="batchnorm.py",
        comparisons=[*batchnorm("float32"), *batchnorm("bfloat16")],
    ),
    Benchmark(
        name="accumulate",
        section="Batches in chunks",
        script="accumulate.py",
        quick="--quick --networks resnet --sides whole raycl-1 raycl-4 gradcache sentence-transformers",
        table=chunk_table,
        comparisons=[*chunks("resnet"), *chunks("transformer")],
    ),
    Benchmark(
        name="knn",
        section="Neighbors",
        script="knn.py",
        comparisons=[
            *neighbors("kNN among 50,000", "s", "cpu_seconds"),
            *neighbors("kNN among 50,000, memory", "MB", "extra_mb"),
        ],
    ),
    Benchmark(
        name="bank",
        section="Bank",
        script="bank.py",
        quick="--blocks 1 --steps 3 --repeats 5",
        table=bank_table,
        comparisons=[
            *bank("moco_v2", "queue"),
            *bank("instance_discrimination", "memory bank"),
            *bank_rows("read", "rows read from the memory bank in process"),
            # numpy's scatter does less: it has no slot momentum.
            *bank_rows("write", "rows written to it, with slot momentum", is_drawn=False),
        ],
    ),
    Benchmark(
        name="step_profile",
        section="A step's time",
        script="step_profile.py",
        flags=f"--images {IMAGES} --pairs {PAIRS} --output {{output}}/step_profile.png",
        quick="--batch-size 32 --steps 8",
        table=step_table,
        picture="shares of a step by phase",
        comparisons=[
            *wait("simclr"),
            *wait("moco_v2"),
            *wait("instance_discrimination"),
            *wait("two_tower"),
        ],
    ),
    Benchmark(
        name="startup",
        section="Start",
        script="startup.py",
        quick="--repeats 1",
        comparisons=[
            Comparison(what=what, unit="s", own=("seconds", key))
            for key, what in {
                "accepted": "command validated",
                "worker up": "first worker ready",
                "first step": "first step done",
            }.items()
        ],
    ),
    Benchmark(
        name="growth",
        section="Growth",
        script="growth.py",
        flags="--output {output}/growth.png",
        quick="--quick --only queue bank batch",
        table=growth_table,
        picture="seconds over size",
        comparisons=[
            Comparison(what=what, unit=unit, own=("points", kind, {"size": size}, key))
            for kind, size, title in (
                ("rows", 1_000_000, "an epoch of 1,000,000 rows"),
                ("queue", 1_048_576, "a step with a queue of 1,048,576 keys"),
                ("bank", 10_000_000, "reads and writes of a bank of 10,000,000 rows"),
                ("batch", 65_536, "NT-Xent of 65,536 pairs"),
            )
            for what, unit, key in ((title, "s", "seconds"), (f"{title}, memory", "MB", "mb"))
            # A second step of a queue or a bank takes no memory above the first one's.
            if unit == "s" or kind in ("rows", "batch")
        ],
    ),
    Benchmark(
        name="large_batch",
        section="Large batches",
        script="large_batch.py",
        flags=f"--data {IMAGES} {{data}}/cifar10/test.parquet --steps 3",
        quick="--batch-size 2048 --steps 2",
        comparisons=[
            Comparison(what="training", unit="samples/s", own=("step", "samples_per_second")),
            Comparison(what="the worker's peak memory", unit="MB", own=("step", "peak_mb", "train worker")),
            Comparison(what="NT-Xent of the batch", unit="s", own=("losses", "nt_xent", "wall_s")),
            Comparison(what="NT-Xent's memory", unit="MB", own=("losses", "nt_xent", "memory_mb")),
            Comparison(what="InfoNCE, 1,048,576 keys", unit="s", own=("losses", "info_nce", "wall_s")),
        ],
    ),
    Benchmark(
        name="scale_training",
        section="Messages",
        script="scale_training.py",
        quick="--batch-size 512",
        comparisons=[
            *messages("gather"),
            *messages("gather's gradient"),
            *messages("parameters' gradient"),
        ],
    ),
)
