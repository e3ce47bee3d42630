"""Tables of single benchmarks: all sides, phases or sizes, beside their few comparisons."""

from typing import Any

from measuring import markdown_table

from raycl.distributed.step_timer import REST

PHASES = {
    "data": "wait for rows",
    "views": "draw views",
    "keys": "encode keys",
    "forward": "forward",
    "loss": "loss",
    "messages": "messages",
    "backward": "backward",
    "update": "update",
    "store": "queue or bank",
    REST: "all else",
}
WALL = "wall"
CHUNK_SIDES = {
    "whole": "whole batch",
    "raycl-0": "raycl, no graph kept",
    "raycl-1": "raycl, 1 kept (the default)",
    "raycl-4": "raycl, 4 kept",
    "gradcache": "GradCache",
    "sentence-transformers": "sentence-transformers' cached loss",
    "whole-batchnorm": "whole batch with BatchNorm",
    "lockstep": "raycl, BatchNorm over the whole batch",
    "lockstep-milestones": "... `activation_checkpoint_every=1`",
    "gradcache-batchnorm": "GradCache, BatchNorm per chunk",
}
WHOLE, WHOLE_BATCHNORM = "whole", "whole-batchnorm"
BATCHNORM_SIDES = (WHOLE_BATCHNORM, "lockstep", "lockstep-milestones", "gradcache-batchnorm")
STORES = {"process": "in process", "actor": "in an actor"}
DUE = {"rows": 1.0, "queue": 1.0, "bank": 0.0, "batch": 2.0}  # the exponents of the work
UNITS = {"rows": "rows read", "queue": "keys", "bank": "slots", "batch": "pairs"}


def step_table(result: dict[str, Any]) -> str:
    """Return milliseconds a step by phase, a column a recipe, each with its share of the step."""
    found = result["steps"]
    rows = [
        (title, *(_milliseconds(parts, name) for parts in found.values()))
        for name, title in (PHASES | {WALL: "the step"}).items()
    ]
    return markdown_table(["ms a step", *found], rows)


def growth_table(result: dict[str, Any]) -> str:
    """Return the power with which seconds grow, beside that of the work."""
    rows = []
    for kind, points in result["points"].items():
        least, most = points[0], points[-1]
        cells = [kind, f"{least['size']:,} to {most['size']:,} {UNITS[kind]}"]
        cells += [f"{least['seconds']:.3g} to {most['seconds']:.3g}"]
        rows.append([*cells, f"{result['exponents'][kind]:.2f}", f"{DUE[kind]:g}"])
    return markdown_table(["work", "from, to", "seconds", "power", "of the work"], rows)


def chunk_table(result: dict[str, Any]) -> str:
    """Return time, memory and error of every side, beside the whole batch of the same network."""
    columns = ["network", "side", "CPU s", "of the whole", "MB", "of the whole"]
    rows = []
    by_side = {(line["network"], line["side"]): line for line in result["lines"]}
    for line in result["lines"]:
        whole = by_side[line["network"], WHOLE_BATCHNORM if line["side"] in BATCHNORM_SIDES else WHOLE]
        seconds, of_whole = line["cpu_s"], line["cpu_s"]["median"] / whole["cpu_s"]["median"]
        cells = [line["network"], CHUNK_SIDES[line["side"]]]
        cells += [f"{seconds['median']:.2f} ({seconds['min']:.2f}-{seconds['max']:.2f})", f"{of_whole:.2f}"]
        cells += [f"{line['memory_mb']:,.0f}", f"{line['memory_mb'] / whole['memory_mb']:.2f}"]
        rows.append([*cells, "-" if line["error"] is None else f"{line['error']:.1e}"])
    return markdown_table([*columns, "gradient error against float64"], rows)


def bank_table(result: dict[str, Any]) -> str:
    """Return the time of a step in its store, and the microseconds of rows read and written."""
    steps = []
    for found in result["results"]:
        for store, title in STORES.items():
            step = found[f"{store}_step_ms"]
            shares = [found[f"{store}_{what}_percent"]["median"] for what in ("waited", "store")]
            cells = [found["method"], title, f"{step['median']:.0f} ({step['min']:.0f}-{step['max']:.0f})"]
            steps.append([*cells, *(f"{share:.2f}%" for share in shares)])
    rates = {found["method"]: found for found in result["results"]}["instance_discrimination"]["rates"]
    rows = [(what, f"{rate['us']:,.0f}", f"{rate['rows_per_s'] / 1e6:.2f}") for what, rate in rates.items()]
    columns = ["method", "store", "step, ms", "blocked on the store", "reads and writes in all"]
    tables = markdown_table(columns, steps), markdown_table(["memory bank", "µs", "million rows/s"], rows)
    return "\n\n".join(tables)


def _milliseconds(parts: dict[str, float], name: str) -> str:
    """Return the time of a phase and its share of the step."""
    if name not in parts:
        return "-"
    share = "" if name == WALL else f" ({parts[name] / parts[WALL]:.1%})"
    return f"{parts[name]:,.1f}{share}"
