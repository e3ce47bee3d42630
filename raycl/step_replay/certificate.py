"""``raycl certify``: check a run against the history in its chain, and compute some of its steps again."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, final

from raycl.chain import CHAIN, sha256_of_files
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, DataError
from raycl.lease import writing
from raycl.records import METRICS, RESULT, read_object
from raycl.step_replay.check_history import ChainedHistory, Check, checked
from raycl.step_replay.check_rows import DrawnRows
from raycl.step_replay.recompute import RecomputedStep, RecomputedSteps
from raycl.step_replay.record import read_record
from raycl.step_replay.rows import read_rows
from raycl.storage import Place, absolute

CERTIFICATE = "certificate.json"
_OF_ROWS = ("rows", "corpus", "samples", "steps")  # the checks that need the data


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
            | ({"last hash": self.chain, "proves": self.proves} if self.is_valid else {}),
            columns=("step", "checkpoint", "workers", "recorded loss", "in float64", "difference", "equal"),
            rows=rows,
        )


_FIELDS = [each.name for each in fields(Certificate)]


def certify(run: str, *, steps: int = 4, data: Sequence[str] = ()) -> Certificate:
    """Check a run, as ``raycl.certify`` does."""
    if steps < 0:
        raise ConfigError(f"--steps must be at least 0, got {steps}")
    record = read_record(run, data=data)
    history = ChainedHistory(record)
    checks = list(history.checks())
    recomputed: list[RecomputedStep] = []
    epochs: list[dict[str, int]] = []
    if checks[0].passed:
        try:
            rows = read_rows(record)
        except ConfigError as error:  # one process cannot repeat the steps
            names = [name for name in _OF_ROWS if name != "corpus" or record.config.text.corpus]
            checks += [Check(name=name, passed=None, text=str(error)) for name in names]
        except DataError as error:
            checks.append(Check(name="rows", passed=False, text=str(error)))
        else:
            drawn, again = DrawnRows(history, rows), RecomputedSteps(history, rows)
            checks += [*drawn.checks(), checked("steps", lambda: again.check(steps))]
            recomputed, epochs = again.steps, drawn.epochs
    last = history.links[-1] if history.links else {}
    made = history.starts
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
        files=_files_of(history),
        proves=_statement(history, checks, recomputed, epochs),
    )


def check_certificate(file: str, run: str | None = None) -> Certificate:
    """Check a certificate and the run that it describes, as ``raycl.check_certificate`` does."""
    place = Place(absolute(file))
    found = _parsed(place)
    values = {name: value for name, value in found.items() if name != "sha256"}
    checks = [checked("certificate", lambda: _check_unchanged(place, found, values))]
    if not checks[0].passed:
        return Certificate(**_known(values) | {"checks": checks, "recomputed": [], "proves": ""})
    output = absolute(run) if run is not None else place.parent.uri
    record = read_record(output)
    history = ChainedHistory(record)
    own = list(history.checks())  # before the comparison, which needs the links
    earlier, recomputed = _results_in(place, values)
    checks += [checked("same run", lambda: _check_same(history, values)), *own]
    checks += [
        Check(name=each.name, passed=each.passed, text=f"{each.text} (when it was certified)")
        for each in earlier
        if each.name in _OF_ROWS
    ]
    proves = _statement(history, checks, recomputed, values["epochs"])
    changes = {"run": output, "checks": checks, "recomputed": recomputed, "proves": proves}
    return Certificate(**_known(values) | changes)


def _statement(
    history: ChainedHistory,
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
    found = read_object(place)
    if not {"sha256", "valid", *_FIELDS} <= found.keys():
        raise DataError(f"{place} is no certificate; make one by raycl certify RUN")
    return found


def _results_in(place: Place, values: Mapping[str, Any]) -> tuple[list[Check], list[RecomputedStep]]:
    """Return the checks and the recomputed steps of a certificate; raises ``DataError`` if they are none."""
    try:
        checks = [Check(**each) for each in values["checks"]]
        return checks, [RecomputedStep(**each) for each in values["recomputed"]]
    except TypeError:
        raise DataError(f"{place} is no certificate; make one by raycl certify RUN") from None


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in _FIELDS}


def _check_unchanged(place: Place, found: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    if found["sha256"] != _hash_of(values) or not found["valid"]:
        raise DataError(f"{place} was changed after it was written")
    return f"written {time.strftime('%Y-%m-%d %H:%M', time.gmtime(found['certified']))} UTC"


def _files_of(history: ChainedHistory) -> dict[str, str]:
    """Return the hashes of the files that a certificate of this run binds, after its checks."""
    return history.files | sha256_of_files(history.run.output, (CHAIN, METRICS, RESULT))


def _check_same(history: ChainedHistory, values: Mapping[str, Any]) -> str:
    found = _files_of(history)
    for name, value in values["files"].items():
        if found.get(name) != value:
            raise DataError(f"{name} is not the file that was certified")
    if others := found.keys() - values["files"].keys():
        raise DataError(f"the certificate does not bind {', '.join(sorted(others))}")
    last = history.links[-1] if history.links else {}
    facts = {"chain": last.get("hash", ""), "links": len(history.links), "steps": last.get("step", 0)}
    for name, value in {**facts, "recipe": history.run.config.recipe}.items():
        if values[name] != value:
            raise DataError(f"the certificate has {name} {values[name]}, and the run {value}")
    return f"{len(found)} files"
