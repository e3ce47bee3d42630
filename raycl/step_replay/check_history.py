"""The checks of a run's files against its chain: settings, encoder, log and checkpoints."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from raycl.chain import CHAIN, CHECKPOINT, END, START, kept_links, log_heads, read_chain, sha256_of_files
from raycl.errors import ConfigError, DataError
from raycl.models.registry import SPEC
from raycl.records import CHECKPOINTS, CONFIG, METRICS, RESULT, STATE, as_object, complete_checkpoints
from raycl.step_replay.record import RecordedRun

# A tracker may fail after the end of a run. Its line may have no metrics, which would replace those of the run.
_OF_NOTICE = {
    "step", "num_steps", "samples", "epoch", "stage", "workers", "time", "event", "text", "seconds", "wall_seconds",
    "goodput", "tracking_failures",
}  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: ``passed`` is None if the run does not allow it."""

    name: str
    passed: bool | None
    text: str


def checked(name: str, work: Callable[[], str]) -> Check:
    """Return the result of a check, which raises ``DataError`` if it fails, and ``ConfigError`` if it cannot be made."""
    try:
        return Check(name=name, passed=True, text=work())
    except DataError as error:
        return Check(name=name, passed=False, text=str(error))
    except ConfigError as error:
        return Check(name=name, passed=None, text=str(error))


@final
class ChainedHistory:
    """The chain of a run and the files that it binds; needs neither data nor torch."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.links: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}  # their hashes, of those that the chain binds
        self._saved: list[str] = []

    def checks(self) -> Iterator[Check]:
        """Yield the checks of the chain, and if it is whole, of the files."""
        whole = checked("chain", self._check_chain)
        yield whole
        if whole.passed:
            yield checked("files", self._check_files)
            yield checked("log", self._check_log)
            yield checked("checkpoints", self._check_checkpoints)

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
        # Before the chain: a run that still trains adds the link of a checkpoint first.
        self._saved = complete_checkpoints(output)
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
        found_final = {"steps": result.get("steps"), **as_object(result.get("final"))}
        for name in final | found_final:
            value, found = final.get(name), found_final.get(name)
            is_same = found is None if value is None or not math.isfinite(value) else _is_close(found, value)
            if not is_same or name not in final:
                raise DataError(f"{name} is {value} in {CHAIN}, and {found} in {RESULT}")
        return f"{len(links)} links, starts of workers: {len(self.starts)}, {links[-1]['step']:,} steps"

    def _check_files(self) -> str:
        # A run that is started again deletes the encoder's spec, and the encoder is the one of the last checkpoint.
        has_ended = self.links[-1]["kind"] == END and (self.is_finished or (self.run.output / SPEC).exists())
        of_end = self.links[-1]["files"] if has_ended else {}
        bound = {**self.starts[-1]["files"], **of_end}
        found = sha256_of_files(self.run.output, bound)
        self.files |= found
        for name, value in bound.items():
            if found.get(name) != value:
                how = "was changed" if name in found else "is missing"
                if not self.is_finished and name in found and name not in of_end:
                    raise DataError(
                        f"{name} was changed after the workers last started, by another program or by a --resume that ended "
                        "before they started again; in that case continue the run with --resume"
                    )
                raise DataError(f"{name} {how} since the run wrote it")
        self._check_precision()
        return ", ".join(bound)

    def _check_precision(self) -> None:
        """Raise if the chain names a lower precision than the settings do: it decides how close a step must be."""
        asked = self.run.config.precision
        for start in self.starts:
            # A machine without bfloat16 trains in float32, and --resume may add or remove GPUs.
            is_float32 = asked == "float32" or (asked == "auto" and start["device"] == "cpu")
            if is_float32 and start["precision"] != "float32":
                raise DataError(f"the precision is float32 in {CONFIG}, and {start['precision']} in {CHAIN}")

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
        if self.is_finished and any(
            line.get("event") != "tracking" or line.keys() - _OF_NOTICE for line in rest
        ):
            raise DataError(f"{METRICS} has lines after the end of the run")
        return f"{bound:,} lines" + (f"; the last {len(rest):,} are not bound" if rest else "")

    def _check_checkpoints(self) -> str:
        bound = {link["name"]: link["state"] for link in self.links if link["kind"] == CHECKPOINT}
        folder = self.run.output / CHECKPOINTS
        there = {path for path, _ in folder.files()} if folder.exists() else set[str]()
        # The list may lack them. The last one may be incomplete: its link is written first.
        linked = (link["name"] for link in self.kept[:-1] if link["kind"] == CHECKPOINT)
        names = sorted({*self._saved, *(name for name in linked if f"{name}/{STATE}" in there)})
        # Those that a run that still trains has not deleted since.
        found = sha256_of_files(self.run.output, (f"{CHECKPOINTS}/{name}/{STATE}" for name in names))
        self.files |= found
        states = {path.split("/")[1]: value for path, value in found.items()}
        for name, value in states.items():
            if name not in bound:
                raise DataError(f"the run did not save the checkpoint {name}")
            if value != bound[name]:
                raise DataError(f"the checkpoint {name} is not the one that the run saved")
        return ", ".join(states) or "none is left"


def _is_close(found: Any, value: float) -> bool:
    """Whether a number of a JSON file, with six digits, is this one."""
    return isinstance(found, int | float) and math.isclose(found, value, rel_tol=1e-5)
