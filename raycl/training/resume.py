"""Resumed runs: the settings and data that they must repeat, and the list of checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, config_to_yaml, differences
from raycl.errors import ConfigError, StorageError
from raycl.models.registry import SPEC, TOKENIZER
from raycl.provenance import save_command_line
from raycl.storage import Place, absolute
from raycl.tokenization import Tokenizer, Vocabulary

CONFIG = "config.yaml"
DATA = "data.json"
# The settings that a resumed run may change: resources, checkpoints, monitoring and logging. It may also
# extend the last stage and append further stages.
MAY_CHANGE = re.compile(
    r"workers|min_workers|gpu|accelerator|autoscaling|cpus_per_worker|stages\.\d+\.(workers|chunk_size|cached_chunks|activation_checkpoint_every)|"
    r"checkpoints\..*|monitor\..*|tracking\..*|data\.cache|bank\.(detached|max_staleness|timeout_s)|log_every_steps|max_failures"
)


def check_output(config: RunConfig, output: Place, *, resume: bool) -> None:
    """Check that the output is writable; an earlier run there requires ``resume`` and the same settings."""
    saved = output / CONFIG
    if saved.exists():
        if not resume:
            raise ConfigError(
                f"{output} holds an earlier run; give another --output, or --resume to continue it"
            )
        _check_unchanged(config_from_yaml(saved.read_text(), name=saved.uri), config)
    output.check_writable()


def _check_unchanged(saved: RunConfig, config: RunConfig) -> None:
    """Refuse to resume with settings that would change the views or weights of the rest of the run."""
    last = len(saved.stages) - 1
    if len(config.stages) <= last:
        raise ConfigError(
            f"the run has {last + 1} stages, and --resume got only {len(config.stages)}; repeat all of them "
            "(further ones may follow), or give another --output"
        )
    longer = re.compile(rf"stages\.{last}\.(epochs|steps)")
    added = tuple(f"stages.{index}." for index in range(last + 1, len(config.stages)))
    for key, (before, now) in differences(saved, config).items():
        if key == "precision" and saved.tower_precision == config.tower_precision:
            continue
        if not (MAY_CHANGE.fullmatch(key) or longer.fullmatch(key) or key.startswith(added)):
            raise ConfigError(
                f"--resume would change {key} from {before!r} to {now!r}; "
                "repeat the flags of the first run, or give another --output"
            )


def check_same_data(output: Place, now: dict[str, Any]) -> None:
    """Refuse to resume on other rows, or on the same rows in another order.

    The same rows at another address, such as a copy in a nearer bucket, are accepted.
    """
    if not (output / DATA).exists():
        return
    before = json.loads((output / DATA).read_text())
    if before["num_rows"] != now["num_rows"]:
        raise ConfigError(
            f"the run began with {before['num_rows']} rows ({before['data'] or 'a dataset'}), and --resume got "
            f"{now['num_rows']} ({now['data'] or 'a dataset'}); give the same data, or another --output"
        )
    if before["streamed"] != now["streamed"]:
        raise ConfigError(
            f"the data were {_kept(before)} and would be {_kept(now)} on this cluster, in another order; "
            "set data.cache to materialize or stream, as at first, or give another --output"
        )
    began = before["workers"]
    if now["streamed"] and began != now["workers"][: len(began)]:
        raise ConfigError(
            f"a streamed epoch depends on the number of workers: the run began with {_listed(began)}, got "
            f"{_listed(now['workers'])}; repeat them, or give another --output"
        )


def describe_data(
    config: RunConfig, data: str | None, num_rows: int, classes: Any, *, streamed: bool
) -> dict[str, Any]:
    """Return the content of ``data.json``, which a resumed run is compared with."""
    ranges = [config.worker_range(stage) for stage in config.stages]
    return {
        "data": data and absolute(data),
        "num_rows": num_rows,
        "streamed": streamed,
        "classes": classes,
        "workers": [most if least == most else f"{least}:{most}" for least, most in ranges],
    }


def save_run_files(
    output: Place, config: RunConfig, described: dict[str, Any], vocabulary: Vocabulary | None
) -> None:
    """Write the files that a resumed run reads, and delete the encoder's spec until the run ends."""
    (output / SPEC).delete()  # until then, the encoder is the one of the last checkpoint
    (output / CONFIG).write_text(config_to_yaml(config))
    (output / DATA).write_text(json.dumps(described) + "\n")
    save_command_line(output)
    if vocabulary is not None:
        (output / TOKENIZER).write_text(vocabulary.tokenizer.to_json())


def _listed(workers: list[int | str]) -> str:
    """Return the workers of all stages, or a single number where all have the same."""
    return str(workers[0]) if len(set(workers)) == 1 else f"{', '.join(map(str, workers))} by stage"


def _kept(described: dict[str, Any]) -> str:
    return "streamed" if described["streamed"] else "held in memory"


CHECKPOINTS = "checkpoints"
LISTED = "checkpoint_manager_snapshot.json"
_COPY = "checkpoint_list.json"
_RESULTS, _LATEST, _NUMBERS = "checkpoint_results", "latest_checkpoint_result", "checkpoint_report_indices"
_NAME = "checkpoint_dir_name"


def backup_manifest(output: Place) -> None:
    """Copy the list of checkpoints, unless it is truncated."""
    if output.is_local and (listed := _read(output / CHECKPOINTS / LISTED)) is not None:
        (output / CHECKPOINTS / _COPY).write_text(json.dumps(listed))


def repair_manifest(output: Place) -> str | None:
    """Replace a truncated list of checkpoints by its copy; return a message, or None for an intact list.

    Without a copy, at most one checkpoint should exist, which no list contains: the truncated list is
    deleted.

    Raises:
        StorageError: The list is truncated, and there are several checkpoints and no copy.
    """
    folder = output / CHECKPOINTS
    place = folder / LISTED
    if not (output.is_local and place.exists()) or _read(place) is not None:
        return None
    copy = copied_list(folder)
    if copy is not None:
        place.write_text(json.dumps(copy))
        return "the list of checkpoints was truncated: resuming from the one before"
    if len({path.split("/")[0] for path, _ in folder.files() if "/" in path}) > 1:
        raise StorageError(
            f"{place} is truncated and has no copy: move the folder {CHECKPOINTS} away to start over with "
            "--resume, or give another --output"
        )
    Path(place.resolve()[1]).unlink()
    return "the list of the first checkpoint was truncated: starting over"


def copied_list(folder: Place) -> dict[str, Any] | None:
    """Return the copied list of checkpoints in ``folder``, without deleted ones; None without a copy."""
    copy = _read(folder / _COPY)
    return None if copy is None else _without_deleted(copy, folder)


def _read(place: Place) -> dict[str, Any] | None:
    """Return the parsed content, or None if the file is missing or truncated."""
    if not place.exists():
        return None
    try:
        found = json.loads(place.read_text())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _without_deleted(listed: dict[str, Any], folder: Place) -> dict[str, Any]:
    """Remove checkpoints that were deleted after the copy was made."""
    numbers = listed.get(_NUMBERS) or range(len(listed[_RESULTS]))
    kept = [
        (result, number)
        for result, number in zip(listed[_RESULTS], numbers, strict=True)
        if (folder / result[_NAME]).exists()
    ]
    results = [result for result, _ in kept]
    # Results are ordered by score, numbers by time.
    newest = max(kept, key=lambda pair: pair[1], default=(None, 0))[0]
    latest = listed[_LATEST] if listed[_LATEST] in results else newest
    return listed | {_RESULTS: results, _NUMBERS: [number for _, number in kept], _LATEST: latest}


def load_tokenizer(uri: str) -> Tokenizer:
    """Read a ``tokenizer.json``, or the tokenizer of a run; raises ``StorageError`` or ``ConfigError``."""
    place = Place(uri)
    if not uri.endswith(".json"):
        place = place / TOKENIZER
    if not place.exists():
        raise StorageError(f"found no tokenizer at {place}; give a tokenizer.json, or the output of a run")
    return Tokenizer(place.read_text())
