"""``raycl certify``: check a run against the history in its chain, and compute some of its steps again."""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, final

import numpy as np

from raycl.chain import (
    CHAIN,
    CHECKPOINT,
    END,
    START,
    hash_of_draw,
    kept_links,
    log_heads,
    read_chain,
    sha256_of_files,
)
from raycl.data.fingerprint import fingerprint
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, DataError
from raycl.inference.checkpoint_encoder import complete_checkpoints
from raycl.lease import writing
from raycl.records import CHECKPOINTS, METRICS, RESULT, STATE
from raycl.step_replay.find import drawn_ids
from raycl.step_replay.float64 import has_dropout, losses_in_float64
from raycl.step_replay.record import RecordedRun, read_record
from raycl.step_replay.restore import train_until
from raycl.step_replay.rows import RunRows, read_rows
from raycl.storage import Place, absolute
from raycl.training.checkpoint import numbers_of
from raycl.training.process import available_cores, prepared_process

CERTIFICATE = "certificate.json"
_EXACT = 1e-5  # relative difference of a loss in float32 right after a checkpoint
_AFTER_UPDATE = 2e-4  # of the loss after one update in float32
_BFLOAT16 = 2e-2  # of all losses of a run in bfloat16


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: ``passed`` is None if the run does not allow it."""

    name: str
    passed: bool | None
    text: str


@final
@dataclass(frozen=True, kw_only=True)
class RecomputedStep:
    """A step that was computed again in float64, after ``checkpoint`` (None for the start of the run).

    ``workers`` made it in the run. ``updates`` is the number of updates that were computed again before it.
    """

    step: int
    checkpoint: str | None
    workers: int
    updates: int
    loss: float
    recorded_loss: float
    relative_difference: float
    is_equal: bool


@final
@dataclass(frozen=True, kw_only=True)
class Certificate(Displayable):
    """The checks of a run, and the conclusion from them.

    Attributes:
        run: the address of the run.
        recipe: its recipe.
        steps: its last step.
        certified: when, in seconds since 1970.
        version: the version of raycl that trained last.
        chain: the hash of the last link of ``chain.jsonl``.
        links: the number of links.
        checks: the checks and their results.
        recomputed: the steps that were computed again.
        epochs: of each epoch, the number of training samples, of those drawn, and of those drawn twice.
        files: the SHA-256 of each file that the certificate binds, by its path in the run.
        proves: the conclusion from the checks, and its limits.
    """

    run: str
    recipe: str
    steps: int
    certified: int
    version: str
    chain: str
    links: int
    checks: list[Check]
    recomputed: list[RecomputedStep] = field(default_factory=list)
    epochs: list[dict[str, int]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    proves: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with ``valid`` and the hash of all of them."""
        values = {"valid": self.is_valid, **asdict(self)}
        return {**values, "sha256": _hash_of(values)}

    def write(self, file: str | None = None) -> Place:
        """Write the certificate to a file, by default ``certificate.json`` of the run, and return its address.

        Raises ``ConfigError`` if the run is still training, ``StorageError`` if the file cannot be written.
        """
        output = Place(absolute(self.run))
        place = output / CERTIFICATE if file is None else Place(absolute(file))
        with writing(output) if file is None else writing(place, is_file=True):
            place.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        return place

    def to_table(self) -> Table:
        """Show the checks, and the steps that were computed again."""
        words = {True: "passed", False: "FAILED", None: "not checked"}
        rows = [
            (
                f"{each.step:,}",
                each.checkpoint or "start",
                each.workers,
                f"{each.recorded_loss:.8g}",
                f"{each.loss:.8g}",
                f"{each.relative_difference:.1e}",
                "yes" if each.is_equal else "NO",
            )
            for each in self.recomputed
        ]
        return Table(
            title=f"{self.run}: {'certified' if self.is_valid else 'NOT certified'}",
            facts={each.name: f"{words[each.passed]}: {each.text}" for each in self.checks}
            | ({"proves": self.proves} if self.is_valid else {}),
            columns=("step", "checkpoint", "workers", "recorded loss", "in float64", "difference", "equal"),
            rows=rows,
        )


def certify(run: str, *, steps: int = 4, data: Sequence[str] = ()) -> Certificate:
    """Check a run, as ``raycl.certify`` does."""
    if steps < 0:
        raise ConfigError(f"--steps must be at least 0, got {steps}")
    record = read_record(run, data=data)
    history = _History(record)
    checks = list(history.checks())
    recomputed: list[RecomputedStep] = []
    epochs: list[dict[str, int]] = []
    if checks[0].passed:
        later = _Rows(history)
        checks += later.checks(steps)
        recomputed, epochs = later.recomputed, later.epochs
    last = history.links[-1] if history.links else {}
    made = [link for link in history.links if link["kind"] == START]
    return Certificate(
        run=run,
        recipe=record.config.recipe,
        steps=last.get("step", 0),
        certified=int(time.time()),
        version=made[-1]["version"] if made else "",
        chain=last.get("hash", ""),
        links=len(history.links),
        checks=checks,
        recomputed=recomputed,
        epochs=epochs,
        files=history.files | sha256_of_files(record.output, (CHAIN, METRICS, RESULT)),
        proves=_statement(history, checks, recomputed, epochs),
    )


def check_certificate(file: str, run: str | None = None) -> Certificate:
    """Check a certificate and the run that it describes, as ``raycl.check_certificate`` does."""
    place = Place(absolute(file))
    found = _parsed(place)
    values = {name: value for name, value in found.items() if name != "sha256"}
    checks = [_checked("certificate", lambda: _check_unchanged(place, found, values))]
    if not checks[0].passed:
        return Certificate(**_known(values) | {"checks": checks, "recomputed": [], "proves": ""})
    output = absolute(run) if run is not None else place.beside("").uri
    record = read_record(output)
    history = _History(record)
    checks += [_checked("same run", lambda: _check_same(record.output, values)), *history.checks()]
    earlier = [Check(**each) for each in values["checks"]]
    checks += [
        Check(name=each.name, passed=each.passed, text=f"{each.text} (when it was certified)")
        for each in earlier
        if each.name in ("rows", "samples", "steps")
    ]
    recomputed = [RecomputedStep(**each) for each in values["recomputed"]]
    return Certificate(**_known(values) | {"run": output, "checks": checks, "recomputed": recomputed})


@final
class _History:
    """The chain of a run and the files that it binds; needs neither data nor torch."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.links: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}  # their hashes, of those that the chain binds

    def checks(self) -> Iterator[Check]:
        """Yield the checks of the chain, and if it is whole, of the files."""
        whole = _checked("chain", self._check_chain)
        yield whole
        if whole.passed:
            yield _checked("files", self._check_files)
            yield _checked("log", self._check_log)
            yield _checked("checkpoints", self._check_checkpoints)

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return self.run.result.get("status") == "finished"

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The links of all starts."""
        return [link for link in self.links if link["kind"] == START]

    def _check_chain(self) -> str:
        output = self.run.output
        self.links = links = read_chain(output)
        if not links:
            raise DataError(f"the run has no {CHAIN}: an older version of raycl made it")
        self.kept = kept_links(links)
        first = self.kept[0]
        if first["kind"] != START or first["step"] != 0:
            raise DataError(
                f"{CHAIN} begins at step {first['step']}, without the history of the steps before"
            )
        result = self.run.result
        if not self.is_finished:
            return f"{len(links)} links up to step {links[-1]['step']:,}; the run has not finished"
        if links[-1]["kind"] != END or result.get("chain") != links[-1]["hash"]:
            raise DataError(f"the last link of {CHAIN} is not the one that result.json names")
        final = {"steps": links[-1]["step"], **links[-1]["final"]}
        found_final = {"steps": result.get("steps"), **result["final"]}
        for name in final | found_final:
            value, found = final.get(name), found_final.get(name)
            is_same = found is None if value is None or not math.isfinite(value) else _is_close(found, value)
            if not is_same or name not in final:
                raise DataError(f"{name} is {value} in {CHAIN}, and {found} in {RESULT}")
        return f"{len(links)} links, starts of workers: {len(self.starts)}, {links[-1]['step']:,} steps"

    def _check_files(self) -> str:
        bound = dict(self.starts[-1]["files"])
        bound |= self.links[-1]["files"] if self.is_finished else {}
        found = sha256_of_files(self.run.output, bound)
        self.files |= found
        for name, value in bound.items():
            if found.get(name) != value:
                how = "was changed" if name in found else "is missing"
                raise DataError(f"{name} {how} since the run wrote it")
        return ", ".join(bound)

    def _check_log(self) -> str:
        lines = (self.run.output / METRICS).read_text().splitlines()
        heads = list(log_heads(lines))
        bound = 0
        for link in self.kept:
            if "log" not in link:
                continue
            number = link["log"]["lines"]
            if number >= len(heads) or heads[number] != link["log"]:
                raise DataError(
                    f"lines {bound + 1:,} to {number:,} of {METRICS} are not those of the run at step {link['step']:,}"
                )
            bound = number
        losses = self.run.losses
        for link in self.kept:
            for step, loss in link.get("losses", {}).items():
                logged = losses.get(int(step), {"loss": loss})["loss"]
                if not _is_close(logged, loss):
                    raise DataError(f"step {step} has loss {loss:g} in {CHAIN}, and {logged} in {METRICS}")
        rest = [json.loads(line) for line in lines[bound:]]
        if self.is_finished and any(line.get("event") != "tracking" for line in rest):
            raise DataError(f"{METRICS} has lines after the end of the run")
        return f"{bound:,} lines" + (f"; the last {len(rest):,} are not bound" if rest else "")

    def _check_checkpoints(self) -> str:
        bound = {link["name"]: link["state"] for link in self.links if link["kind"] == CHECKPOINT}
        there = complete_checkpoints(self.run.output)
        names = {name: f"{CHECKPOINTS}/{name}/{STATE}" for name in there}
        found = sha256_of_files(self.run.output, names.values())
        self.files |= found
        for name, path in names.items():
            if name not in bound:
                raise DataError(f"the run did not save the checkpoint {name}")
            if found.get(path) != bound[name]:
                raise DataError(f"the checkpoint {name} is not the one that the run saved")
        return ", ".join(names) or "none is left"


@final
class _Rows:
    """The checks that need the rows of the run."""

    def __init__(self, history: _History) -> None:
        self._history, self._run = history, history.run
        self.recomputed: list[RecomputedStep] = []
        self.epochs: list[dict[str, int]] = []

    def checks(self, num_steps: int) -> list[Check]:
        """Return the checks of the rows, of the samples of each epoch, and of some steps."""
        try:
            rows = read_rows(self._run)
        except ConfigError as error:  # one process cannot repeat the steps
            return [Check(name=name, passed=None, text=str(error)) for name in ("rows", "samples", "steps")]
        except DataError as error:
            return [Check(name="rows", passed=False, text=str(error))]
        return [
            _checked("rows", lambda: self._check_rows(rows)),
            _checked("samples", lambda: self._check_samples(rows)),
            _checked("steps", lambda: self._check_steps(rows, num_steps)),
        ]

    def _check_rows(self, rows: RunRows) -> str:
        found = fingerprint(*(table for tables in rows.job.blocks for table in tables))  # pyright: ignore[reportArgumentType]
        for link in self._history.starts:
            if link["rows"] != found:
                raise DataError(
                    f"the run read other rows at step {link['step']:,} than there are now at {', '.join(self._run.data)}"
                )
        return f"{len(rows.where):,} rows with the contents that the run read"

    def _check_samples(self, rows: RunRows) -> str:
        """Compare the samples that the run drew with the order that the seed determines."""
        bound: dict[int, set[int | None]] = {}
        for link in self._history.kept:
            if "drawn" in link:
                bound.setdefault(link["step"], set()).add(link["drawn"])
        step, total, num_train = 0, 0, sum(rows.job.num_train)
        last = max(bound, default=0)
        of_epoch: list[Any] = []
        for position, ids in islice(drawn_ids(rows), last):
            if of_epoch and position.epoch_step == 0:
                self.epochs.append(_counted(len(self.epochs), of_epoch, num_train))
                of_epoch = []
            step, total = position.step + 1, (total + hash_of_draw(ids, position.epoch)) % 2**64
            of_epoch.append(ids)
            if bound.get(step, {total}) != {total}:
                raise DataError(
                    f"up to step {step:,} the run drew other samples than the order of its seed has: some were skipped, or "
                    "drawn twice"
                )
        if step < last:
            raise DataError(f"the run made {last:,} steps, and its settings have {step:,}")
        if of_epoch:
            self.epochs.append(_counted(len(self.epochs), of_epoch, num_train))
        twice = sum(epoch["drawn_twice"] for epoch in self.epochs)
        # By class, samples are drawn with repetition, and two data sets may have equal ids.
        is_once = self._run.config.data.samples_per_class is None and len(rows.job.num_train) == 1
        if twice and is_once:
            raise DataError(f"{twice:,} samples were drawn twice in an epoch")
        drawn = sum(epoch["drawn"] for epoch in self.epochs)
        return f"{drawn:,} in {len(self.epochs)} epochs of {num_train:,} training samples, {twice:,} twice in an epoch"

    def _check_steps(self, rows: RunRows, num_steps: int) -> str:
        groups, refused = list(self._recomputable()), ""
        random.SystemRandom().shuffle(groups)
        with prepared_process(available_cores()):
            for start, losses in groups:
                if len(self.recomputed) < num_steps:
                    try:
                        self.recomputed += self._recompute(rows, start, losses)
                    except ConfigError as error:  # one process cannot repeat these steps
                        refused = str(error)
        self.recomputed.sort(key=lambda each: each.step)
        wrong = [each for each in self.recomputed if not each.is_equal]
        if wrong:
            first = wrong[0]
            raise DataError(
                f"step {first.step:,} has loss {first.recorded_loss:.8g} in {CHAIN}, and {first.loss:.8g} when it is computed "
                "again"
            )
        if refused and not self.recomputed:
            raise ConfigError(refused)
        there = sum(len(losses) for _, losses in groups)
        return f"{len(self.recomputed)} of {there} steps next to a checkpoint that is left, or to the start"

    def _recomputable(self) -> Iterator[tuple[dict[str, Any], dict[int, float]]]:
        """Yield the start link and the recorded losses of successive steps whose state before them is left."""
        saved = [numbers for name in complete_checkpoints(self._run.output) if (numbers := numbers_of(name))]
        start = self._history.starts[-1]
        now = start["settings"]
        for link in self._history.kept:
            if link["kind"] == START:
                start = link
            losses = {int(step): loss for step, loss in link.get("losses", {}).items()}
            # With other settings, for example more epochs, the learning rate was another one.
            if not losses or start["settings"] != now:
                continue
            first = min(losses)
            before = [rollbacks for step, _, rollbacks in saved if step == first - 1]
            before += [0] if first == 1 else []
            if any(self._run.is_kept(first, rollbacks=rollbacks) for rollbacks in before):
                yield start, losses

    def _recompute(
        self, rows: RunRows, start: Mapping[str, Any], losses: Mapping[int, float]
    ) -> list[RecomputedStep]:
        """Compute successive steps again; raises ``ConfigError`` if one process cannot repeat them."""
        first = min(losses)
        before = train_until(rows, first, workers=start["workers"])
        if before.first_step != first:
            raise ConfigError(f"the state before step {first:,} cannot be read")
        if start["device"] != "cpu" and has_dropout(before.runner):
            raise ConfigError("the run drew dropout on a GPU, whose random numbers a CPU does not repeat")
        found = []
        for updates, loss in enumerate(losses_in_float64(before, len(losses))):
            recorded = losses[first + updates]
            difference = abs(loss - recorded) / max(abs(recorded), 1.0)
            limit = _AFTER_UPDATE if updates else _EXACT
            step = RecomputedStep(
                step=first + updates,
                checkpoint=before.checkpoint,
                workers=start["workers"],
                updates=updates,
                loss=loss,
                recorded_loss=recorded,
                relative_difference=difference,
                is_equal=difference <= (limit if start["precision"] == "float32" else _BFLOAT16),
            )
            found.append(step)
        return found


def _counted(epoch: int, batches: Sequence[Any], num_train: int) -> dict[str, int]:
    ids = np.concatenate(batches)
    distinct = len(np.unique(ids))
    return {"epoch": epoch, "samples": num_train, "drawn": len(ids), "drawn_twice": len(ids) - distinct}


def _is_close(found: Any, value: float) -> bool:
    """Whether a number of a JSON file, with six digits, is this one."""
    return isinstance(found, int | float) and math.isclose(found, value, rel_tol=1e-5)


def _checked(name: str, work: Callable[[], str]) -> Check:
    try:
        return Check(name=name, passed=True, text=work())
    except DataError as error:
        return Check(name=name, passed=False, text=str(error))
    except ConfigError as error:
        return Check(name=name, passed=None, text=str(error))


def _statement(
    history: _History,
    checks: Sequence[Check],
    recomputed: Sequence[RecomputedStep],
    epochs: Sequence[Mapping[str, int]],
) -> str:
    """Return the conclusion from the checks, and its limits; nothing if one failed."""
    passed = {check.name for check in checks if check.passed}
    if any(check.passed is False for check in checks):
        return ""
    proved = ["the files of this run are the ones that it wrote, by its chain of hashes"]
    if not history.is_finished:
        step = history.links[-1]["step"]
        proved = [f"this unfinished run wrote its settings, its checkpoints and its log up to step {step:,}"]
    if "rows" in passed:
        proved.append("its data have the contents that it read")
    if "samples" in passed:
        proved.append(f"its {len(epochs)} epochs drew exactly the samples that its seed orders")
    if recomputed:
        proved.append(f"{len(recomputed)} of its steps give the recorded losses in float64 in one process")
    return (
        f"It proves that {', that '.join(proved)}. It does not prove who trained it, or the steps between those that were "
        "computed again: a forger can train a run with a chain of its own, so publish the last hash when the run ends."
    )


def _hash_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _parsed(place: Place) -> dict[str, Any]:
    if not place.exists():
        raise DataError(f"there is no certificate at {place}; make one by raycl certify RUN")
    try:
        found = json.loads(place.read_text())
    except ValueError as error:
        raise DataError(f"{place} is damaged: {error}") from None
    if not isinstance(found, dict) or not {"sha256", "checks", "files", "chain"} <= found.keys():
        raise DataError(f"{place} is no certificate; make one by raycl certify RUN")
    return found


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "valid"}


def _check_unchanged(place: Place, found: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    if found["sha256"] != _hash_of(values) or not found["valid"]:
        raise DataError(f"{place} was changed after it was written")
    return f"written {time.strftime('%Y-%m-%d %H:%M', time.gmtime(found['certified']))} UTC"


def _check_same(output: Place, values: Mapping[str, Any]) -> str:
    found = sha256_of_files(output, values["files"])
    for name, value in values["files"].items():
        if found.get(name) != value:
            raise DataError(f"{name} is not the file that was certified")
    return f"{len(found)} files"
