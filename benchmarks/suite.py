"""The benchmarks that ``run.py`` runs, in its order, with the aims of the project where there are any.

Not among them are ``gpu.py``, which needs a GPU, ``scale.py``, ``autoscale.py``, ``autoscale_keys.py`` and ``soak.py``,
which have documents of their own, and ``monitor.py`` and ``bank_query.py``, which have no peer.
"""

from typing import Any

from comparisons import Benchmark, Comparison

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
        "From the command to the first step of two workers, including the start of Ray; the aim is 8 s. "
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
    "read numpy": "numpy",
    "rows": "its rows",
    "whole": "whole batch",
    "write numpy": "numpy",
}


def compare(what: str, unit: str, key: str, own: str, *peers: str, **named: Any) -> list[Comparison]:
    """Set the line of one side beside those of others; ``named`` are fields of a comparison, or words of the case."""
    fields = {name: named.pop(name) for name in ("peer", "aim", "is_drawn", "other_of") if name in named}

    def line(side: str) -> tuple[dict[str, Any], str]:
        return {"side": side} | named, key

    shared: dict[str, Any] = {"what": what, "unit": unit, "own": line(own)}
    return [
        Comparison(**shared | {"peer": NAMES.get(peer, peer), "other": line(peer)} | fields) for peer in peers
    ] or [Comparison(**shared)]


def loss(what: str, *peers: str, is_drawn: bool = True, **case: Any) -> list[Comparison]:
    """Compare the CPU time and the memory of a loss."""
    return [
        *compare(what, "ms", "cpu_ms", "raycl", *peers, is_drawn=is_drawn, **case),
        *compare(f"{what}, memory", "MB", "memory_mb", "raycl", *peers, is_drawn=is_drawn, **case),
    ]


def batch_loss(name: str, title: str, dims: dict[int, list[str]]) -> Benchmark:
    """Compare a loss of a batch with peers, by dimension, at two sizes of which the smaller one is not drawn."""
    comparisons = []
    for dim, peers in dims.items():
        comparisons += loss(f"{title}, 4,096 x {dim}", *peers, size=4_096, dim=dim)
    comparisons += loss(f"{title}, 1,024 x 128", dims[128][0], is_drawn=False, size=1_024, dim=128)
    flags = "--sizes 1024 4096" if name == "nt_xent" else f"--loss {name} --sizes 1024 4096"
    return Benchmark(
        name=name,
        section="Losses and layers",
        script="loss.py",
        flags=flags,
        quick="--quick",
        comparisons=comparisons,
    )


def training(recipe: str, title: str) -> list[Benchmark]:
    """Train beside lightly; the aim of bfloat16 is over lightly in float32, as it comes."""
    rate = "samples/s", "samples_per_second", "raycl"
    exact, rounded = f"{title}, ResNet-18", f"{title}, ResNet-18, bfloat16"
    in_float32 = {"aim": 2.8, "other_of": recipe, "peer": "lightly in float32"}
    flags = f"--data {IMAGES} --recipe {recipe} --encoder resnet18"
    kinds = {
        recipe: (
            flags,
            [*compare(exact, *rate, "lightly", aim=1.7), *compare(exact, *rate, "encoder", aim=0.9)],
        ),
        f"{recipe}_bfloat16": (
            f"{flags} --precision bfloat16",
            [
                *compare(rounded, *rate, "lightly", **in_float32),
                *compare(rounded, *rate, "lightly"),
                *compare(rounded, *rate, "encoder", aim=0.9),
            ],
        ),
    }
    return [
        Benchmark(
            name=name,
            section="Whole training",
            script="train_step.py",
            flags=flags,
            quick="--batch-size 32 --steps 5 --repeats 1",
            comparisons=comparisons,
        )
        for name, (flags, comparisons) in kinds.items()
    ]


def towers(encoder: str, title: str) -> list[Comparison]:
    """Compare the rate and the memory of training two towers."""
    what, sides = f"two_tower, {title}", ("raycl", "sentence-transformers")
    return [
        *compare(what, "samples/s", "samples_per_second", *sides, aim=1.5, encoder=encoder),
        *compare(f"{what}, workers' memory", "MB", "workers_mb", *sides, encoder=encoder),
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
            for each in compare(title, "images/s", "images_per_second", side, peer, aim=hoped)
        ],
    )


def chunks(network: str) -> list[Comparison]:
    """Compare the CPU time and the memory of a batch in chunks."""
    four, one = f"{network} in chunks, 4 kept", f"{network} in chunks, 1 kept"
    cached = "gradcache", "sentence-transformers"
    return [
        *compare(four, "s", "cpu_s", "raycl-4", "whole", aim=1 / 1.30, network=network),
        *compare(f"{four}, memory", "MB", "memory_mb", "raycl-4", "whole", aim=4.0, network=network),
        *compare(one, "s", "cpu_s", "raycl-1", *cached, network=network),
        *compare(f"{one}, memory", "MB", "memory_mb", "raycl-1", *cached, network=network),
    ]


def batchnorm(dtype: str) -> list[Comparison]:
    case: dict[str, Any] = {"shape": "256 x 64 x 32 x 32", "layout": "channels_last", "dtype": dtype}
    return compare(f"synchronized BatchNorm, {dtype}", "ms", "cpu_ms", "synchronized", "nn", **case)


def bank(method: str, title: str) -> list[Comparison]:
    memory = f"{title}, the actor's memory"
    return [
        *compare(f"a step, {title} in an actor", "ms", "step_ms", "actor", "process", method=method),
        *compare(memory, "MB", "memory_mb", "held", "rows", is_drawn=False, method=method),
    ]


def wait(recipe: str) -> Comparison:
    words = {"side": recipe}
    return Comparison(
        what=f"{recipe}, waiting for rows",
        unit="ms",
        own=(words, "data"),
        peer="whole step",
        other=(words, "wall"),
        aim=1 / 0.03,
        is_drawn=False,
    )


def growth(kind: str, size: int, title: str) -> list[Comparison]:
    seconds = compare(title, "s", "seconds", kind, size=size)
    # A second step of a queue or a bank takes no memory above the first one's.
    if kind in ("queue", "bank"):
        return seconds
    return seconds + compare(f"{title}, memory", "MB", "memory_mb", kind, size=size)


def messages(what: str) -> list[Comparison]:
    return compare(what, "bytes", what, "measured", "model", is_drawn=False, workers=4)


LIGHTLY, TORCHVISION = "lightly SimCLRTransform", "torchvision v2, PIL"
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
            each
            for size, peers in {
                32: (LIGHTLY, TORCHVISION),
                96: (LIGHTLY,),
                224: (LIGHTLY, TORCHVISION),
            }.items()
            for each in compare(f"a view of {size} pixels", "µs", "us_per_view", "raycl", *peers, size=size)
        ],
    ),
    batch_loss("nt_xent", "NT-Xent", {128: ["lightly", "plain"], 512: ["lightly"]}),
    batch_loss("bidirectional", "bidirectional", {128: ["open_clip"], 512: ["open_clip"]}),
    batch_loss("hinge", "hinge", {128: ["plain"]}),
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
        has_table=True,
        comparisons=[*chunks("resnet"), *chunks("transformer")],
    ),
    Benchmark(
        name="knn",
        section="Neighbors",
        script="knn.py",
        comparisons=[
            *compare("kNN among 50,000", "s", "cpu_s", "raycl", "scikit-learn", rows=50_000),
            *compare("kNN among 50,000, memory", "MB", "memory_mb", "raycl", "scikit-learn", rows=50_000),
        ],
    ),
    Benchmark(
        name="bank",
        section="Bank",
        script="bank.py",
        quick="--blocks 1 --steps 3 --repeats 5",
        has_table=True,
        comparisons=[
            *bank("moco_v2", "queue"),
            *bank("instance_discrimination", "memory bank"),
            *compare("rows read from the memory bank in process", "µs", "us", "read store", "read numpy"),
            # numpy's scatter does less: it has no slot momentum.
            *compare(
                "rows written to it, with slot momentum",
                "µs",
                "us",
                "write store",
                "write numpy",
                is_drawn=False,
            ),
        ],
    ),
    Benchmark(
        name="step_profile",
        section="A step's time",
        script="step_profile.py",
        flags=f"--images {IMAGES} --pairs {PAIRS} --output {{output}}/step_profile.png",
        quick="--batch-size 32 --steps 8",
        has_table=True,
        picture="shares of a step by phase",
        comparisons=[*map(wait, ("simclr", "moco_v2", "instance_discrimination", "two_tower"))],
    ),
    Benchmark(
        name="startup",
        section="Start",
        script="startup.py",
        quick="--repeats 1",
        comparisons=[
            *compare("command validated", "s", "seconds", "accepted"),
            *compare("first worker ready", "s", "seconds", "worker up"),
            *compare("first step done", "s", "seconds", "first step"),
        ],
    ),
    Benchmark(
        name="growth",
        section="Growth",
        script="growth.py",
        flags="--output {output}/growth.png",
        quick="--quick --only queue bank batch",
        has_table=True,
        picture="seconds over size",
        comparisons=[
            *growth("rows", 1_000_000, "an epoch of 1,000,000 rows"),
            *growth("queue", 1_048_576, "a step with a queue of 1,048,576 keys"),
            *growth("bank", 10_000_000, "reads and writes of a bank of 10,000,000 rows"),
            *growth("batch", 65_536, "NT-Xent of 65,536 pairs"),
        ],
    ),
    Benchmark(
        name="large_batch",
        section="Large batches",
        script="large_batch.py",
        flags=f"--data {IMAGES} {{data}}/cifar10/test.parquet --steps 3",
        quick="--batch-size 2048 --steps 2",
        comparisons=[
            *compare("training", "samples/s", "samples_per_second", "training"),
            *compare("the worker's peak memory", "MB", "memory_mb", "training"),
            *compare("NT-Xent of the batch", "s", "wall_s", "nt_xent"),
            *compare("NT-Xent's memory", "MB", "memory_mb", "nt_xent"),
            *compare("InfoNCE, 1,048,576 keys", "s", "wall_s", "info_nce"),
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
