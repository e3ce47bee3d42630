"""A run as its output records it, and the conditions under which one process can repeat its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from raycl.arguments import listed
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.errors import ConfigError, DataError
from raycl.models.registry import trained_own_network
from raycl.records import CONFIG, DATA, RESULT, ROLLBACK, find_run, read_metrics, read_object, read_result
from raycl.storage import Place


@final
@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The configuration of a run, the addresses and the number of its rows, its lines of metrics and its result.

    ``data`` is empty for a Ray Dataset, which has no address, unless they were given. ``lines`` lack the steps that a
    rollback undid. ``rollback_steps`` are the steps that the run was rolled back to.
    """

    output: Place
    config: RunConfig
    data: tuple[str, ...]
    num_rows: int
    streamed: bool
    has_address: bool
    classes: tuple[str, ...] | None
    lines: list[dict[str, Any]]
    rollback_steps: tuple[int, ...]
    result: dict[str, Any]

    @property
    def losses(self) -> dict[int, dict[str, Any]]:
        """The line of each logged step."""
        return {line["step"]: line for line in self.lines if "loss" in line}

    @property
    def num_logged(self) -> int:
        """The last logged step."""
        return max(self.losses, default=0)

    @property
    def rollbacks(self) -> int:
        """The number of rollbacks."""
        return len(self.rollback_steps)

    def is_kept(self, step: int, *, rollbacks: int) -> bool:
        """Whether no later rollback undid this step, made after so many rollbacks."""
        return step <= min(self.rollback_steps[rollbacks:], default=step)

    def workers_between(self, first: int, last: int) -> set[tuple[int, int]]:
        """Return the stages and the numbers of workers of these steps by the logged steps within and next to them."""
        lines = self.losses
        begin = max((number for number in lines if number <= first), default=first)
        end = min((number for number in lines if number >= last), default=last)
        chosen = [line for number, line in lines.items() if begin <= number <= end]
        return {(line.get("stage", 0), int(line["workers"])) for line in chosen}


def read_record(run: str, *, data: Sequence[str] = ()) -> RecordedRun:
    """Read a run's output, local or on S3; ``data`` are the addresses of its data if they have moved.

    Raises ``DataError`` if the output holds no run or a file is damaged, ``StorageError`` if one cannot be read.
    """
    output = find_run(run)
    place = output / CONFIG
    config = config_from_yaml(place.read_text(), name=place.uri, trained=True)
    if not (output / DATA).exists():
        raise DataError(f"{output / DATA} is missing: the run did not begin to train")
    described = read_object(output / DATA)
    if not isinstance(described.get("num_rows"), int):
        raise DataError(f"{output / DATA} is damaged: it has no number of rows")
    lines = read_metrics(output)
    classes = described.get("classes")
    return RecordedRun(
        output=output,
        config=config,
        data=tuple(data or listed(described.get("data"))),
        num_rows=described["num_rows"],
        streamed=bool(described.get("streamed")),
        has_address=bool(described.get("data")),
        classes=None if classes is None else tuple(classes),
        lines=_without_undone(lines),
        rollback_steps=tuple(line["step"] for line in lines if line.get("event") == ROLLBACK),
        result=read_result(output) if (output / RESULT).exists() else {},
    )


def check_queue(run: RecordedRun) -> None:
    """Raise ``ConfigError`` for a queue of streamed texts, which has no ids of their rows."""
    if run.streamed and run.config.negatives.store == "queue" and run.config.data.kind != "image":
        raise ConfigError(
            "this run cannot be replayed: its texts are streamed, and replay finds the texts of a queue only in rows held "
            "in memory"
        )


def check_repeatable(run: RecordedRun) -> None:
    """Raise ``ConfigError`` if a step depends on more than checkpoints, rows, and hashes.

    Also if the configuration names code outside the packages in RAYCL_TRUSTED, or the rows have no address.
    """
    config, output = run.config, run.output
    reasons = {
        "it streamed a Ray Dataset, whose blocks have an order of their own": run.streamed
        and not run.has_address,
        "a pool of actors encoded its keys with weights of other steps": config.uses_key_pool,
        "its negatives were mined during training, at times that depend on the cluster": config.negatives.mined.num,
        "it has a guide, whose embeddings replay does not read": config.negatives.guide.query is not None,
        f"actors hold its {config.negatives.store}, whose rows replay does not read": (
            config.negatives.has_slots and config.bank.location == "actor"
        ),
        "it grouped a click log with labels; group it once by jobs/prepare.py and train on that": (
            config.data.kind == "pairs" and config.data.columns.label is not None
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"this run cannot be replayed: {reason}")
    config.check_trusted((output / CONFIG).uri)
    if trained_own_network(output):
        raise ConfigError("the run trained a network of its user's own, which only that program can build")
    if not run.data:
        raise ConfigError(
            "the run trained on a Ray Dataset, which has no address; give the same rows by --data"
        )


def _without_undone(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without the steps that a rollback undid."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if line.get("event") == ROLLBACK:
            kept = [each for each in kept if each["step"] <= line["step"]]
        kept.append(line)
    return kept
