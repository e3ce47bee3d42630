"""Training two towers with explicit hard negatives, beside sentence-transformers' own trainer.

    python benchmarks/pairs.py --data PAIRS.parquet [--workers 2] [--batch-size 256] [--json FILE]

The columns are ``query``, ``document`` and ``negatives``, a list of texts; or ``--group COLUMN`` takes other
documents of the same group as negatives. A row with fewer than ``--negatives`` of them is left out. Both
sides start from the same weights and have the same tokenizer, lengths, batch, loss, AdamW, learning rate,
dropout, float32, and as many processes and threads. raycl's side is ``raycl.train`` with the recipe
two_tower, on Ray; the other is ``SentenceTransformerTrainer`` under torchrun with gloo, whose
MultipleNegativesRankingLoss runs in both directions, with candidates from all processes.
``--sides raycl exported`` trains what ``raycl export`` writes there, in the place of raycl's own network:
modules of that package, which compute with the padding; a bag of subwords has no dropout among them,
and learns vectors of places too.

The sides differ in this:

- The trainer cuts texts into tokens in its collator, in the process that trains, for each batch: ``data``
  says how much of its time that takes. raycl has cut them before its first step, in Ray Data tasks; this is
  in ``whole``, the seconds from the command to its end, and not in the rate.
- raycl masks documents that are a positive of the same query elsewhere in the batch, and watches for collapse;
  the trainer does neither. It could keep repeated texts out of a batch at a price; that is off, as by default.
- raycl's workers average gradients through memory that they share, and keep freed memory to themselves.

A rate is over all steps but the first ten. Memory is the sum of the training processes' peaks (VmHWM, so
that a page they share counts for each), most of it libraries where batches are small, and then of all
processes of a side, Ray's own included; both sides save their state once, behind the last step. The loss
only says that both learn: raycl's is the loss of the last step, the trainer's the mean of the last ten that it
wrote down. Runs are interleaved and figures are medians. The trainer needs ``sentence-transformers[train]``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measuring import describe_machine, make_parser, repeating, summarize, write_json

import raycl
from raycl.config import RunConfig
from raycl.records import read_metrics
from raycl.storage import Place
from raycl.training.process import available_cores

ENCODERS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder.kwargs": {}, "projection_head.dim": 256, "stages.0.learning_rate": 3e-4},
    "bag_of_subwords": {},  # as the recipe has it
}
SIDES = ("raycl", "sentence-transformers", "exported")
WARMUP_STEPS = 10  # and as often both sides write down their loss
PAIRS, OUTCOME = "pairs.parquet", "outcome.json"
LAUNCHER = "torch.distributed.run"


def read_pairs(options: argparse.Namespace) -> pa.Table:
    """Return query, document, and as many negatives for each as asked for."""
    rows = pq.read_table(options.data).to_pylist()
    if options.group is not None:
        add_others_of_group(rows, options.group, options.negatives)
    kept = [
        {
            "query": row["query"],
            "document": row["document"],
            "negatives": row["negatives"][: options.negatives],
        }
        for row in rows
        if len(row["negatives"] or ()) >= options.negatives
    ]
    print(
        f"{len(kept):,} pairs; {len(rows) - len(kept):,} with fewer than {options.negatives} negatives left out"
    )
    if len(kept) < options.batch_size:
        sys.exit(
            f"that is less than a batch of {options.batch_size}; give more data, or a smaller --batch-size"
        )
    return pa.Table.from_pylist(kept)


def add_others_of_group(rows: list[dict[str, Any]], group: str, num_negatives: int) -> None:
    """Give each row the documents that follow its own one in the group."""
    places: dict[Any, dict[str, int]] = {}
    for row in rows:
        known = places.setdefault(row[group], {})
        known.setdefault(row["document"], len(known))
    documents = {name: list(known) for name, known in places.items()}
    for row in rows:
        own, others = places[row[group]][row["document"]], documents[row[group]]
        row["negatives"] = (others[own + 1 :] + others[:own])[:num_negatives]


def configure(options: argparse.Namespace, tokenizer: str | None = None) -> RunConfig:
    settings = {
        "workers": options.workers,
        "text.tokenizer": tokenizer,
        "text.max_length": options.max_length,
        "text.max_document_length": None,
        "encoder.name": options.encoder,
        "stages.0.epochs": None,
        "stages.0.steps": options.steps,
        "stages.0.batch_size": options.batch_size,
        "stages.0.learning_rate_scaling": "none",
        "stages.0.learning_rate_schedule": "constant",
        "stages.0.warmup_epochs": 0.0,
        "evaluation.every_epochs": 0,
        "log_every_steps": WARMUP_STEPS,
    }
    return raycl.override(raycl.recipe("two_tower"), settings | ENCODERS[options.encoder])


def save_start(options: argparse.Namespace, pairs: pa.Table) -> None:
    """Write what all sides start from: pairs, tokenizer and untrained encoder."""
    # Imported here, so that the peer's processes do not pay for it.
    from raycl.models.build import build_encoder, complete_spec, encoder_specs
    from raycl.models.encoder_io import save_encoder
    from raycl.tokenization import Vocabulary

    pq.write_table(pairs, options.folder / PAIRS)
    texts = [*pairs["query"].to_pylist(), *pairs["document"].to_pylist()]
    texts += [text for negatives in pairs["negatives"].to_pylist() for text in negatives]
    config = configure(options)
    vocabulary = Vocabulary.of_texts(
        texts, max_length=options.max_length, size=config.text.vocabulary_size, lowercase=True
    )
    spec = encoder_specs(config, vocabulary.tokenizer)[0]
    network = build_encoder(config, spec, vocabulary)
    start = str(options.folder / "start")
    save_encoder(
        network, complete_spec(spec, network, own=False), Place(start), tokenizer=vocabulary.tokenizer
    )
    raycl.export_encoder(start, str(options.folder / "exported"))


def run_raycl(options: argparse.Namespace) -> None:
    """Train on Ray; write down the rate."""
    config = configure(options, str(options.folder / "start" / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as output:
        raycl.train(config, data=str(options.folder / PAIRS), output=output, quiet=True)
        lines = [line for line in read_metrics(Place(output)) if "loss" in line]
    waits = [line["data_wait_fraction"] for line in lines[1:]]
    write_outcome(
        options, lines[-1]["seconds"] - lines[0]["seconds"], statistics.mean(waits), lines[-1]["loss"]
    )


def write_outcome(options: argparse.Namespace, seconds: float, data_fraction: float, loss: float) -> None:
    rate = (options.steps - WARMUP_STEPS) * options.batch_size / seconds
    outcome = {"samples_per_second": rate, "data_fraction": data_fraction, "loss": loss}
    (options.folder / OUTCOME).write_text(json.dumps(outcome))


def load_model(options: argparse.Namespace) -> Any:
    """Return the encoder for the peer: raycl's own network as a module of it, or the exported encoder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import InputModule
    from transformers import PreTrainedTokenizerFast

    exported = str(options.folder / "exported")
    if options.side == "exported":
        return SentenceTransformer(exported, device="cpu")

    class Network(InputModule):
        """raycl's network behind the tokenizer that the package would take for it."""

        def __init__(self) -> None:
            super().__init__()
            self.network = raycl.load_encoder(str(options.folder / "start")).network
            self.cut = PreTrainedTokenizerFast.from_pretrained(exported)

        def preprocess(self, inputs: Any, prompt: str | None = None, **_: Any) -> dict[str, Any]:
            lengths = {"padding": True, "truncation": True, "max_length": options.max_length}
            return dict(self.cut(list(inputs), return_tensors="pt", **lengths))

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            return features | {"sentence_embedding": self.network(features["input_ids"])}

        def save(self, output_path: str, *args: Any, **_: Any) -> None:
            self.save_torch_weights(output_path)

    return SentenceTransformer(modules=[Network()], device="cpu")


def run_peer(options: argparse.Namespace) -> None:
    """Train with the package's trainer, in one of its processes; the first one writes down the rate."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    torch.set_num_threads(options.threads)
    config, model = configure(options), load_model(options)
    stage = config.stages[0]

    class Collator(SentenceTransformerDataCollator):
        seconds = 0.0

        def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
            start = time.perf_counter()
            batch = super().__call__(features)
            self.seconds += time.perf_counter() - start
            return batch

    collator = Collator(preprocess_fn=model.preprocess)
    stamps: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append((time.perf_counter(), collator.seconds))

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(options.folder / "peer"),
        max_steps=options.steps,
        per_device_train_batch_size=config.local_batch_size(stage),
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        optim="adamw_torch_fused",
        learning_rate=stage.peak_learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=0.0,  # raycl does not clip either
        use_cpu=True,
        # Looking for unused parameters takes time; of an exported network some are.
        ddp_find_unused_parameters=options.side == "exported",
        logging_steps=WARMUP_STEPS,
        save_steps=options.steps,  # once, after the last step, as raycl does: it shows in the memory
        report_to="none",
        disable_tqdm=True,
    )
    loss = MultipleNegativesRankingLoss(
        model,
        scale=1 / stage.temperature,
        gather_across_devices=options.workers > 1,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    data = Dataset.from_dict(peer_columns(pq.read_table(options.folder / PAIRS)))
    trainer = SentenceTransformerTrainer(
        model, arguments, data, loss=loss, data_collator=collator, callbacks=[Clock()]
    )
    trainer.train()
    check_parallel(trainer, options)
    if trainer.is_world_process_zero():
        seconds, cutting = (
            end - start for start, end in zip(stamps[WARMUP_STEPS - 1], stamps[-1], strict=True)
        )
        write_outcome(options, seconds, cutting / seconds, last_loss(trainer.state.log_history))


def peer_columns(pairs: pa.Table) -> dict[str, list[str]]:
    """Return the columns that the package's loss knows by their order."""
    negatives = zip(*pairs["negatives"].to_pylist(), strict=True)
    return {
        "anchor": pairs["query"].to_pylist(),
        "positive": pairs["document"].to_pylist(),
        **{f"negative_{number}": list(texts) for number, texts in enumerate(negatives, 1)},
    }


def check_parallel(trainer: Any, options: argparse.Namespace) -> None:
    """Refuse a measurement of fewer processes than asked for."""
    if trainer.args.world_size != options.workers or trainer.state.global_step != options.steps:
        sys.exit(f"came {trainer.args.world_size} processes and {trainer.state.global_step} steps")


def last_loss(history: list[dict[str, float]]) -> float:
    return [line["loss"] for line in history if "loss" in line][-1]


class Peaks:
    """The peak memory of a side's processes in MB."""

    def __init__(self, root: int, num_workers: int) -> None:
        self.workers_mb = self.all_mb = 0.0
        self._root, self._num_workers = root, num_workers

    def look(self) -> None:
        family = list(processes_below(self._root))
        self.all_mb = max(self.all_mb, sum(peak for _, peak in family))
        workers = [peak for command, peak in family if is_worker(command)]
        if len(workers) == self._num_workers:  # a peak only grows: the last look at all of them counts
            self.workers_mb = sum(workers)


def processes_below(root: int) -> Iterator[tuple[str, float]]:
    """Yield command line and peak in MB of a process and of all that it started."""
    found: dict[int, tuple[int, str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended
        if "VmHWM" in status:
            peak = int(status["VmHWM"].split()[0]) / 1024
            found[int(folder.name)] = int(status["PPid"]), command, peak
    family, size = {root}, 0
    while len(family) > size:
        size = len(family)
        family |= {process for process, (parent, _, _) in found.items() if parent in family}
    yield from (found[process][1:] for process in family & found.keys())


def is_worker(command: str) -> bool:
    """Whether a process trains: an actor of Ray Train, or this file as the peer and not its launcher."""
    is_peer = Path(__file__).name in command and "--side raycl" not in command and LAUNCHER not in command
    return is_peer or (command.startswith("ray::") and "RayTrainWorker" in command)


def run_side(side: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure one side in processes of its own."""
    launch = [] if side == "raycl" or options.workers == 1 else ["-m", LAUNCHER, "--standalone"]
    if launch:
        launch += ["--nproc-per-node", str(options.workers)]
    own = ["--side", side, "--encoder", options.encoder, "--folder", str(options.folder)]
    threads = str(options.threads)
    environment = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    log = options.folder / "log"
    with log.open("w") as output:
        command = [sys.executable, *launch, __file__, *sys.argv[1:], *own]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        start = time.perf_counter()
        peaks = Peaks(process.pid, options.workers)
        with repeating(peaks.look):
            process.wait()
        whole = time.perf_counter() - start
    if process.returncode:
        sys.exit(f"{side} failed:\n{log.read_text()[-3000:]}")
    outcome = json.loads((options.folder / OUTCOME).read_text())
    if not peaks.workers_mb:
        sys.exit(f"{side} was over before all of its processes were seen; give more --steps")
    return outcome | {"workers_mb": peaks.workers_mb, "all_mb": peaks.all_mb, "whole_s": whole}


def measure(options: argparse.Namespace, pairs: pa.Table) -> list[dict[str, Any]]:
    """Run the sides in turn, several times; return a line for each."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        save_start(options, pairs)
        for _ in range(options.repeats):
            for side, measured in runs.items():
                measured.append(run_side(side, options))
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    names = ("samples_per_second", "data_fraction", "loss", "workers_mb", "all_mb", "whole_s")
    return [
        {"encoder": options.encoder, "side": side}
        | {name: summarize([each[name] for each in measured]) for name in names}
        for side, measured in runs.items()
    ]


def print_lines(lines: list[dict[str, Any]]) -> None:
    first = lines[0]
    for line in lines:
        rate, memory = line["samples_per_second"], line["workers_mb"]
        print(
            f"{line['encoder']:<16} {line['side']:<22} {rate['median']:>8,.0f} ({rate['min']:,.0f}-{rate['max']:,.0f}) "
            f"{first['samples_per_second']['median'] / rate['median']:>6.2f}x {memory['median']:>8,.0f} "
            f"{first['workers_mb']['median'] / memory['median']:>6.2f}x {line['all_mb']['median']:>8,.0f} "
            f"{line['data_fraction']['median']:>6.1%} {line['whole_s']['median']:>8.0f} {line['loss']['median']:>7.3f}",
            flush=True,
        )


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="Parquet file with query, document and negatives")
    parser.add_argument("--group", help="a column: other documents of the same group are the negatives")
    parser.add_argument("--negatives", type=int, default=2, help="for each query")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text, query or document")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="queries of all workers")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:2]))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--encoder", choices=ENCODERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS or options.negatives < 1 or options.batch_size % options.workers:
        sys.exit(
            f"give --steps above {WARMUP_STEPS}, for so many are not counted, --negatives of 1 or more, "
            "and a --batch-size that divides over the --workers"
        )
    options.threads = max(1, available_cores() // options.workers)  # as raycl's workers take
    return options


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = read_options()
    if options.side:
        (run_raycl if options.side == "raycl" else run_peer)(options)
        return
    pairs = read_pairs(options)
    settings = {name: value for name, value in vars(options).items() if value is not None}
    settings |= {"json": str(options.json), "num_pairs": len(pairs)}
    print(
        f"{options.workers} processes with {options.threads} threads each, batch {options.batch_size} with "
        f"{options.negatives} negatives a query, texts of {options.max_length} tokens, {options.steps} steps; "
        f"ratios are {options.sides[0]}'s over the line's"
    )
    print(
        f"{'encoder':<16} {'side':<22} samples/s (least-most)  ratio workers' MB ratio  all's MB   data  whole s    loss"
    )
    lines: list[dict[str, Any]] = []
    for encoder in options.encoders:
        options.encoder = encoder
        measured = measure(options, pairs)
        print_lines(measured)
        lines += measured
    report = {"machine": describe_machine(), "settings": settings, "lines": lines}
    write_json(options.json, report)


if __name__ == "__main__":
    main()
