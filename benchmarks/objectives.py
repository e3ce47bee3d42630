"""The table of objectives in docs/objectives.md: what each computes exactly, its memory, and its time beside peers.

    python benchmarks/objectives.py [--only errors costs] [--write docs/objectives.md | --check docs/objectives.md]
        [--costs-of NAME ...] [--rows 4096] [--repeats 9] [--quick] [--json FILE]

Errors: the gradient in float32 of worker processes on this machine against the plain formula in float64 on the whole
batch. A refused cell holds the error message of the configuration. Costs: forward and backward of one process on
one thread, in turns with the peers that are installed; memory in a fresh process each, as in ``loss.py``.
``--check`` compares the page with the errors of a small batch. Each row is a case of ``tests/workers/objectives.py``.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    FOLDER,
    Line,
    add_times,
    alternate,
    apart,
    cost,
    describe_machine,
    make_parser,
    markdown_table,
    report,
    table,
    timed,
)
from torch import Tensor

from raycl.errors import ConfigError
from raycl.loss_specs import LOSSES
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.objective import Partition, StoreBatch
from raycl.recipes import recipe

sys.path.append(str(FOLDER.parent))  # the tests have the plain formulas, and workers without Ray
from tests.embeddings import make_views
from tests.settings import override_active
from tests.workers.objectives import (
    CASES,
    INPUTS,
    Case,
    Setup,
    build_objective,
    on_the_whole_batch,
    on_workers,
    other_views,
    stored_partitions,
)

LIMIT = 1e-5  # of every error
SINGLE: dict[str, Any] = {"dtype": torch.float32, "temperature": 0.1, "tiny_tiles": False}
FULL, SMALL = Setup(scale=12, dim=96, **SINGLE), Setup(scale=2, dim=8, **SINGLE)
ALONE: dict[str, Any] = {"queue": False, "explicit": False, "repeated_ids": False}
# Each column: the changes of the setup, and the settings of a run that asks for it.
COLUMNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 worker": (ALONE, {}),
    "2 workers": (ALONE | {"num_workers": 2}, {}),
    "4 workers": (ALONE | {"num_workers": 4}, {}),
    "chunks": (ALONE | {"num_workers": 2, "chunks": 4}, {"stages.0.chunk_size": 16}),
    "queue": (ALONE | {"num_workers": 2, "queue": True}, {"negatives.store": "queue"}),
    "explicit negatives": (ALONE | {"num_workers": 2, "explicit": True}, {"negatives.explicit": True}),
    "ring": (ALONE | {"num_workers": 4, "by_ring": True}, {}),
    "repeated ids": ({"num_workers": 2}, {}),
}
FIGURE = re.compile(r"\d\.\de[-+]\d\d")
_NUMBER = re.compile(r"\((\d+)\)$")
COSTS = {"cpu_ms": "CPU ms", "cpu_ms_times": "times", "memory_mb": "MB", "value": "value"}


def refusal(case: Case, column: str) -> str | None:
    """Return the product's message if it refuses a run of this kind."""
    changes, name = COLUMNS[column][1], case.recipe
    if "negatives.explicit" in changes and not LOSSES[case.loss].pairs:
        name = "two_tower"  # only pairs have explicit negatives
    settings = {"stages.0.loss": case.loss, **case.run, **changes}
    try:
        override_active(recipe(name, image_size=32), {"negatives.explicit": False}, settings)
    except ConfigError as error:
        return str(error)
    return None


def largest_error(name: str, setup: Setup) -> float:
    """Return the largest relative error of the gradients that a run can use; raise if one should be 0 and is not."""
    ours, true = on_workers(name, setup)[1:], on_the_whole_batch(name, setup)[1:]
    errors, unused = [0.0], {"temperature", "bias"} - {*LOSSES[CASES[name].loss].learns}
    for label, mine, exact in zip(INPUTS, ours, true, strict=True):
        if label in unused:
            continue
        if exact.norm() == 0:
            assert mine.norm() == 0, f"{name}: the gradient of {label} is not 0"
        else:
            errors.append(((mine.double() - exact).norm() / exact.norm()).item())
    return max(errors)


def cell(name: str, column: str, sizes: Setup) -> str:
    """Return the error in a column, or the reason why there is none."""
    case, (changes, _) = CASES[name], COLUMNS[column]
    if message := refusal(case, column):
        return f"refused: {message}"
    setup = replace(sizes, **changes)
    if setup.by_ring and case.no_ring:
        return f"no ring: {case.no_ring}"
    if "negatives.store" in case.run:
        setup = replace(setup, queue=True)
    return f"{largest_error(name, setup):.1e}"


def errors_text(sizes: Setup) -> str:
    """Return the table of errors, with the messages of refusals below it."""
    notes: list[str] = []

    def noted(text: str) -> str:
        if FIGURE.fullmatch(text):
            return text
        if text not in notes:
            notes.append(text)
        return f"{text.split(':')[0]} ({notes.index(text) + 1})"

    rows = []
    for name in CASES:
        print(name, file=sys.stderr, flush=True)
        rows.append([name, *(noted(cell(name, column, sizes)) for column in COLUMNS)])
    messages = [f"{number}. {text}" for number, text in enumerate(notes, 1)]
    return "\n".join([markdown_table(["", *COLUMNS], rows), "", *messages])


def read_errors(text: str) -> dict[str, dict[str, str]]:
    """Return the cells of a table of errors by row and column, with the messages in place of their numbers."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    header, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    cells = {name: [_resolved(each, notes) for each in row] for name, *row in rows}
    return {name: dict(zip(header, row, strict=True)) for name, row in cells.items()}


def _resolved(text: str, notes: Mapping[str, str]) -> str:
    number = _NUMBER.search(text)
    return notes[number[1]] if number else text


def problems(name: str, row: Mapping[str, str], sizes: Setup) -> list[str]:
    """Return the differences between a row of the page and the product."""
    found = []
    for column in COLUMNS:
        theirs, ours = row.get(column, "nothing"), cell(name, column, sizes)
        figures = [float(each) for each in (theirs, ours) if FIGURE.fullmatch(each)]
        if len(figures) < 2 and _statement(theirs) != _statement(ours):
            found.append(f"{name}, {column}: the page has {theirs!r}, and the command {ours!r}")
        if figures and max(figures) > LIMIT:
            found.append(f"{name}, {column}: an error of {max(figures)} is above {LIMIT}")
    return found


def _statement(text: str) -> str:
    """Return a message without its remedy, which names the other losses."""
    return text.partition("; ")[0]


# Costs

TEMPERATURE, BIAS = 0.1, -10.0
Loss = Callable[[Tensor, Tensor], Tensor]


def _lightly(name: str, *arguments: float) -> Loss:
    import lightly.loss

    return getattr(lightly.loss, name)(TEMPERATURE, *arguments)


def _open_clip(name: str, **bias: Tensor) -> Loss:
    import open_clip.loss

    function, scale = getattr(open_clip.loss, name)(), torch.tensor(1 / TEMPERATURE)
    return lambda query, key: function(query, key, scale, **bias)


def _metric_learning(name: str, *, has_labels: bool) -> Loss:
    from pytorch_metric_learning import losses

    function = getattr(losses, name)(temperature=TEMPERATURE)
    return lambda query, key: function(
        torch.cat([query, key]), (_labels(query) if has_labels else torch.arange(len(query))).repeat(2)
    )


def _sentence_transformers(**settings: Any) -> Loss:
    from sentence_transformers.sentence_transformer import losses

    function = losses.MultipleNegativesRankingLoss(None, scale=1 / TEMPERATURE, **settings)  # pyright: ignore[reportArgumentType]
    return lambda query, key: function.compute_loss_from_embeddings([query, key], torch.empty(0))


def _cached_sentence_transformers() -> Loss:
    from sentence_transformers.sentence_transformer import losses

    model: Any = torch.nn.Sequential(torch.nn.Identity())  # it asks for the first module, and calls none
    function = losses.CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    return lambda query, key: function.calculate_loss([[query], [key]], with_backward=True)


def _labels(rows: Tensor) -> Tensor:
    """Return labels of four samples each."""
    return torch.arange(len(rows)) // 4


BOTH_WAYS: dict[str, Any] = {
    "directions": ("query_to_doc", "doc_to_query"),
    "partition_mode": "per_direction",
}
# For each case: the peers with the same loss, by the name of the function.
PEERS: dict[str, dict[str, tuple[str, Callable[[], Loss]]]] = {
    "nt_xent": {
        "NTXentLoss": ("lightly", lambda: _lightly("NTXentLoss")),
        # Its NTXentLoss holds a matrix of positive pairs by negative pairs: 8,192 x 67 million.
        "SupConLoss": (
            "pytorch_metric_learning",
            lambda: _metric_learning("SupConLoss", has_labels=False),
        ),
    },
    "info_nce of pairs": {
        "MultipleNegativesRankingLoss": ("sentence_transformers", _sentence_transformers),
        "CachedMultipleNegativesRankingLoss": ("sentence_transformers", _cached_sentence_transformers),
    },
    "clip": {
        "ClipLoss": ("open_clip", lambda: _open_clip("ClipLoss")),
        "MultipleNegativesRankingLoss": (
            "sentence_transformers",
            lambda: _sentence_transformers(**BOTH_WAYS),
        ),
    },
    "siglip": {"SigLipLoss": ("open_clip", lambda: _open_clip("SigLipLoss", logit_bias=torch.tensor(BIAS)))},
    "dcl": {"DCLLoss": ("lightly", lambda: _lightly("DCLLoss"))},
    "dclw": {"DCLWLoss": ("lightly", lambda: _lightly("DCLWLoss", 0.5))},
    "supcon": {
        "SupConLoss": ("pytorch_metric_learning", lambda: _metric_learning("SupConLoss", has_labels=True))
    },
}


def raycl_loss(name: str, size: int, dim: int) -> Loss:
    """Return the objective of a case with distinct ids, as a step of one worker calls it."""
    case, ids = CASES[name], torch.arange(size)
    objective = build_objective(case, torch.tensor(TEMPERATURE), torch.tensor(BIAS))
    guide = None if case.guide is None else Guide.of(*make_views(size, dim), **case.guide)
    batch, stored = ExampleIds(query=ids, key=ids, label=_labels(ids)), StoreBatch(guide=guide)
    slots = F.normalize(torch.randn(2, size, dim), dim=2)
    if case.own_slot or case.run.get("negatives.store") == "queue":
        key = slots[0] if case.own_slot else None
        stored = StoreBatch(key=key, negatives=slots[1], negative_id=size + ids)
    logs = stored_partitions(size, case.partition).float().log() if case.partition else None

    def compute(query: Tensor, key: Tensor) -> Tensor:
        # A new partition: each call appends its estimates.
        given = stored if logs is None else StoreBatch(partition=Partition(logs))
        return objective(query, None if case.own_slot else other_views(case, query, key), given, batch)

    return compute


def build_step(name: str, side: str, size: int, dim: int) -> Callable[[], float]:
    """Return a function that computes value and gradients of unit rows once."""
    torch.manual_seed(0)
    query, key = (each.clone().requires_grad_() for each in F.normalize(torch.randn(2, size, dim), dim=2))
    loss = raycl_loss(name, size, dim) if side == "raycl" else PEERS[name][side][1]()

    def step() -> float:
        query.grad = key.grad = None
        value = loss(query, key)
        if value.requires_grad:  # otherwise the loss has called backward
            value.backward()
        return value.item()

    return step


def memory_mb(name: str, side: str, size: int, dim: int) -> float:
    """Return the peak memory of one step; libraries and their buffers are loaded before."""
    build_step(name, side, 64, 64)()
    return cost(build_step(name, side, size, dim))["memory_mb"]


def compare(name: str, size: int, dim: int, repeats: int) -> list[Line]:
    """Return a line for raycl and for each peer."""
    sides = {"raycl": "raycl", **{side: module for side, (module, _) in PEERS.get(name, {}).items()}}
    steps = {side: build_step(name, side, size, dim) for side, module in sides.items() if find_spec(module)}
    values = {side: step() for side, step in steps.items()}
    if max(values.values()) - min(values.values()) > 1e-3 * abs(values["raycl"]):
        sys.exit(f"{name}: the sides compute different losses, {values}")
    lines: Sequence[Line] = alternate({side: timed(step) for side, step in steps.items()}, repeats)
    for line in lines:
        side = line["side"]
        line |= {"memory_mb": apart(memory_mb, name, side, size, dim, num_threads=1), "value": values[side]}
    add_times(lines, lines[0], "cpu_ms")
    lines = [*lines, *({"side": side, "skipped": "not installed"} for side in sides if side not in steps)]
    return [{"loss": name, "package": sides[line["side"]]} | line for line in lines]


def costs_text(lines: Sequence[Line], options: argparse.Namespace) -> str:
    """Return the table of costs with its circumstances."""
    machine = describe_machine()
    head = (
        f"{options.rows:,} x 128, {options.repeats} turns, {machine['cpu']}, torch {machine['torch']}, "
        f"load {machine['load_average'][0]:.1f}"
    )
    titles = {"loss": "objective", "package": "package", "side": "function", **COSTS, "skipped": "skipped"}
    return f"{head}\n\n{table(lines, **titles)}"


# The page


def part_of(page: str, name: str) -> tuple[str, str, str]:
    """Return the text before a part of the page, the part, and the text after it."""
    begin, end = (f"<!-- benchmarks/objectives.py: {name} {word} -->" for word in ("begin", "end"))
    before, found, rest = page.partition(begin)
    part, closed, after = rest.partition(end)
    if not (found and closed):
        sys.exit(f"the page has no place for the {name}; put the lines '{begin}' and '{end}' there")
    return before + begin, part.strip(), end + after


def write_parts(path: Path, parts: Mapping[str, str]) -> None:
    """Replace parts of a page."""
    page = path.read_text()
    for name, text in parts.items():
        before, _, after = part_of(page, name)
        page = f"{before}\n\n{text}\n\n{after}"
    path.write_text(page)


def check(path: Path) -> None:
    """Exit with the differences between the page and the errors of a small batch, if there are any."""
    rows = read_errors(part_of(path.read_text(), "errors")[1])
    found = [f"{name}: no such case" for name in rows if name not in CASES]
    for name in CASES:
        found += problems(name, rows.get(name, {}), SMALL)
    if found:
        sys.exit("\n".join([f"{path} differs:", *found]))
    print(f"{path} holds")


def main() -> None:
    parser = make_parser(
        __doc__,
        only=["errors", "costs"],
        costs_of=list(CASES),
        write=None,
        check=None,
        rows=4_096,
        repeats=9,
        quick=False,
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        check(Path(options.check))
        return
    if options.quick:
        options.rows, options.repeats = 256, 2
    parts: dict[str, str] = {}
    lines: list[Line] = []
    if "errors" in options.only:
        parts["errors"] = errors_text(SMALL if options.quick else FULL)
    if "costs" in options.only:
        for name in options.costs_of:
            lines += compare(name, options.rows, 128, options.repeats)
        parts["costs"] = costs_text(lines, options)
    report(options, lines, "\n\n".join(parts.values()))
    if options.write:
        write_parts(Path(options.write), parts)


if __name__ == "__main__":
    main()
