"""Training two towers with explicit hard negatives, beside sentence-transformers' own trainer.

    python benchmarks/pairs.py --data PAIRS.parquet [--group COLUMN] [--negatives 2] [--max-length 64] [--workers 2]
        [--batch-size 256] [--steps 30] [--repeats 3] [--encoders transformer bag_of_subwords] [--json FILE]

The columns are ``query``, ``document`` and ``negatives``, a list of texts; or ``--group COLUMN`` takes other
documents of the same group as negatives. A row with fewer than ``--negatives`` of them is left out. Both
sides start from the same weights and have the same tokenizer, lengths, batch, loss, AdamW, learning rate,
dropout, float32, and as many processes and threads. raycl's side is ``raycl.train`` with the recipe
two_tower, on Ray; the other is ``SentenceTransformerTrainer`` in processes joined by gloo, whose
MultipleNegativesRankingLoss runs in both directions, with candidates from all processes. They differ in this:

- The trainer cuts texts into tokens in its collator, in the process that trains, for each batch: ``data``
  says how much of its time that takes. raycl has cut them before its first step, in Ray Data tasks; this is
  in ``whole``, the seconds from the command to its end, and not in the rate.
- raycl masks documents that are a positive of the same query elsewhere in the batch, and watches for collapse;
  the trainer does neither. It could keep repeated texts out of a batch at a price; that is off, as by default.
- raycl's workers average gradients through memory that they share, and keep freed memory to themselves.

A rate is over all steps but the first ten. Memory is the sum of the training processes' peaks (VmHWM, so
that a page they share counts for each), most of it libraries where batches are small, and then of all
processes of a side, Ray's own included; both sides save their state once, behind the last step. The loss
only says that both learn: of the last ten steps. The sides take turns. The trainer needs
``sentence-transformers[train]``.
"""

import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measuring import (
    Line,
    add_times,
    alternate,
    apart,
    in_workers,
    make_parser,
    processes,
    read_status,
    repeating,
    report,
    table,
)
from training_steps import logged_steps, steps_alone

import raycl
from raycl.gpus import available_cores

ENCODERS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder.kwargs": {}, "projection_head.dim": 256, "stages.0.learning_rate": 3e-4},
    "bag_of_subwords": {},  # as the recipe has it
}
WARMUP_STEPS = 10  # and as often both sides write down their loss
Options = dict[str, Any]


def read_pairs(options: Namespace) -> pa.Table:
    """Return query, document, and as many negatives for each as asked for."""
    rows, number = pq.read_table(options.data).to_pylist(), options.negatives
    if options.group is not None:
        add_others_of_group(rows, options.group, number)
    rows = [row | {"negatives": (row["negatives"] or [])[:number]} for row in rows]
    kept = [row for row in rows if len(row["negatives"]) == number]
    left_out = len(rows) - len(kept)
    print(f"{len(kept):,} pairs; {left_out:,} with fewer than {number} negatives left out")
    if len(kept) < options.batch_size:
        sys.exit(f"that is less than a batch of {options.batch_size}; give a smaller --batch-size")
    return pa.Table.from_pylist(kept).select(["query", "document", "negatives"])


def add_others_of_group(rows: list[dict[str, Any]], group: str, num_negatives: int) -> None:
    """Give each row the documents that follow its own one in the group."""
    groups: dict[Any, dict[str, None]] = {}
    for row in rows:
        groups.setdefault(row[group], {})[row["document"]] = None
    for row in rows:
        documents = list(groups[row[group]])
        own = documents.index(row["document"])
        row["negatives"] = (documents[own + 1 :] + documents[:own])[:num_negatives]


def settings_of(options: Options) -> dict[str, Any]:
    own = {
        "text.tokenizer": None,
        "text.max_length": options["max_length"],
        "text.max_document_length": None,
        "encoder.name": options["encoder"],
        "stages.0.learning_rate_scaling": "none",
        "stages.0.learning_rate_schedule": "constant",
        "stages.0.warmup_epochs": 0.0,
    }
    steps = steps_alone(Namespace(**options), workers=options["workers"], precision="float32")
    return steps | own | {"log_every_steps": WARMUP_STEPS} | ENCODERS[options["encoder"]]


def save_start(options: Options, pairs: pa.Table) -> None:
    """Write what both sides start from: pairs, tokenizer and untrained encoder."""
    from raycl.models.build import build_encoder, complete_spec, encoder_specs
    from raycl.models.encoder_io import save_encoder
    from raycl.storage import Place
    from raycl.tokenization import Vocabulary

    pq.write_table(pairs, f"{options['folder']}/pairs.parquet")
    texts = [*pairs["query"].to_pylist(), *pairs["document"].to_pylist()]
    texts += [text for negatives in pairs["negatives"].to_pylist() for text in negatives]
    config = raycl.override(raycl.recipe("two_tower"), settings_of(options))
    length, size = options["max_length"], config.text.vocabulary_size
    vocabulary = Vocabulary.of_texts(texts, max_length=length, size=size, lowercase=True)
    spec = encoder_specs(config, vocabulary.tokenizer)[0]
    network = build_encoder(config, spec, vocabulary)
    start = f"{options['folder']}/start"
    spec = complete_spec(spec, network, own=False)
    save_encoder(network, spec, Place(start), tokenizer=vocabulary.tokenizer)
    raycl.export_encoder(start, f"{options['folder']}/exported")


def outcome(options: Options, seconds: float, data_fraction: float, loss: float) -> dict[str, float]:
    rate = (options["steps"] - WARMUP_STEPS) * options["batch_size"] / seconds
    return {"samples_per_second": rate, "data_fraction": data_fraction, "loss": loss}


def train_raycl(options: Options) -> dict[str, float]:
    """Train on Ray."""
    settings = settings_of(options) | {"text.tokenizer": f"{options['folder']}/start/tokenizer.json"}
    lines = logged_steps("two_tower", settings, f"{options['folder']}/pairs.parquet")
    waits = statistics.mean(line["data_wait_fraction"] for line in lines[1:])
    return outcome(options, lines[-1]["seconds"] - lines[0]["seconds"], waits, lines[-1]["loss"])


def train_peer(options: Options) -> dict[str, float]:
    """Train with the package's trainer, in as many processes."""
    return in_workers(peer_worker, options["workers"], options)[0]


def load_model(options: Options) -> Any:
    """Return raycl's own network as a module of the package, behind the tokenizer that it would take for it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import InputModule
    from transformers import PreTrainedTokenizerFast

    class Network(InputModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = raycl.load_encoder(f"{options['folder']}/start").network
            self.cut = PreTrainedTokenizerFast.from_pretrained(f"{options['folder']}/exported")

        def preprocess(self, inputs: Any, prompt: str | None = None, **_: Any) -> dict[str, Any]:
            lengths = {"padding": True, "truncation": True, "max_length": options["max_length"]}
            return dict(self.cut(list(inputs), return_tensors="pt", **lengths))

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            return features | {"sentence_embedding": self.network(features["input_ids"])}

        def save(self, output_path: str, *args: Any, **_: Any) -> None:
            self.save_torch_weights(output_path)

    return SentenceTransformer(modules=[Network()], device="cpu")


def peer_worker(rank: int, options: Options) -> dict[str, float]:
    """Train in one of the trainer's processes, which finds the others by its environment."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options["workers"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "HF_HUB_OFFLINE": "1"}
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    torch.set_num_threads(options["threads"])
    config, model = raycl.override(raycl.recipe("two_tower"), settings_of(options)), load_model(options)
    stage = config.stages[0]
    cutting_s, stamps = [0.0], []

    class Collator(SentenceTransformerDataCollator):
        def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
            start = time.perf_counter()
            batch = super().__call__(features)
            cutting_s[0] += time.perf_counter() - start
            return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append((time.perf_counter(), cutting_s[0]))

    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{options['folder']}/peer",
        max_steps=options["steps"],
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
        ddp_find_unused_parameters=False,
        logging_steps=WARMUP_STEPS,
        save_steps=options["steps"],  # once, after the last step, as raycl does: it shows in the memory
        report_to="none",
        disable_tqdm=True,
    )
    loss = MultipleNegativesRankingLoss(
        model,
        scale=1 / stage.temperature,
        gather_across_devices=options["workers"] > 1,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    data = Dataset.from_dict(peer_columns(pq.read_table(f"{options['folder']}/pairs.parquet")))
    collator = Collator(preprocess_fn=model.preprocess)
    trainer = SentenceTransformerTrainer(
        model, arguments, data, loss=loss, data_collator=collator, callbacks=[Clock()]
    )
    trainer.train()
    if trainer.args.world_size != options["workers"] or trainer.state.global_step != options["steps"]:
        sys.exit(f"came {trainer.args.world_size} processes and {trainer.state.global_step} steps")
    seconds, cutting = (end - start for start, end in zip(stamps[WARMUP_STEPS - 1], stamps[-1], strict=True))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return outcome(options, seconds, cutting / seconds, losses[-1] if losses else float("nan"))


def peer_columns(pairs: pa.Table) -> dict[str, list[str]]:
    """Return the columns that the package's loss knows by their order."""
    columns = {"anchor": pairs["query"].to_pylist(), "positive": pairs["document"].to_pylist()}
    negatives = zip(*pairs["negatives"].to_pylist(), strict=True)
    return columns | {f"negative_{number}": list(texts) for number, texts in enumerate(negatives, 1)}


SIDES = {"raycl": train_raycl, "sentence-transformers": train_peer}
WORKERS = {"raycl": "RayTrainWorker", "sentence-transformers": "multiprocessing.spawn import spawn_main"}


def run(side: str, options: Options) -> dict[str, float]:
    """Run a side in processes of its own, and add their memory and the seconds of the whole."""
    peaks = {"workers_mb": 0.0, "all_mb": 0.0}

    def look() -> None:
        found, family, size = processes(), {os.getpid()}, 0
        while len(family) > size:
            size = len(family)
            family |= {pid for pid, (parent, _) in found.items() if parent in family}
        mb = {pid: read_status("VmHWM", pid) for pid in family - {os.getpid()} if pid in found}
        workers = [mb[pid] for pid in mb if WORKERS[side] in found[pid][1]]
        peaks["all_mb"] = max(peaks["all_mb"], sum(mb.values()))
        if len(workers) == options["workers"]:  # a peak only grows: the last look at all of them counts
            peaks["workers_mb"] = sum(workers)

    began = time.perf_counter()
    with repeating(look):
        environment = {"RAYON_NUM_THREADS": str(options["threads"])}
        found = apart(SIDES[side], options, num_threads=options["threads"], environment=environment)
    if not peaks["workers_mb"]:
        sys.exit(f"{side} was over before all of its processes were seen; give more --steps")
    return found | peaks | {"whole_s": time.perf_counter() - began}


def compare(encoder: str, options: Namespace, pairs: pa.Table) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        given = vars(options) | {"encoder": encoder, "folder": folder}
        save_start(given, pairs)
        lines = alternate({side: partial(run, side, given) for side in options.sides}, options.repeats)
    add_times(lines, lines[0], "samples_per_second", "workers_mb")
    return [{"encoder": encoder} | line for line in lines]


def main() -> None:
    flags: dict[str, Any] = {"negatives": 2, "max_length": 64, "workers": 2, "batch_size": 256, "steps": 30}
    flags |= {"repeats": 3, "encoders": list(ENCODERS), "sides": list(SIDES)}
    options = make_parser(__doc__, data=str, group=None, **flags).parse_args()
    if options.steps <= WARMUP_STEPS or options.negatives < 1 or options.batch_size % options.workers:
        sys.exit(
            f"give --steps above {WARMUP_STEPS}, for so many are not counted, --negatives of 1 or more, "
            "and a --batch-size that divides over the --workers"
        )
    options.threads = max(1, available_cores() // options.workers)  # as raycl's workers take
    pairs = read_pairs(options)
    lines = [line for encoder in options.encoders for line in compare(encoder, options, pairs)]
    titles = {"samples_per_second": "samples/s", "samples_per_second_times": "times"}
    titles |= {"workers_mb": "workers' MB", "workers_mb_times": "times", "all_mb": "all's MB"}
    titles |= {"data_fraction": "data", "whole_s": "whole, s", "loss": "loss"}
    report(options, lines, table(lines, encoder="encoder", side="", **titles))


if __name__ == "__main__":
    main()
