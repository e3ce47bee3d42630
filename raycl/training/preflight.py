"""Checks of a run before the import of torch and the start of Ray, and the rules of ``--resume``."""

import contextlib
import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raycl.config import RunConfig
from raycl.config.conditions import why_inactive
from raycl.config.overrides import config_from_yaml, config_to_yaml, differences, leaves
from raycl.data.columns import (
    ColumnNames,
    ColumnNamesWithoutNegatives,
    CorpusColumnNames,
    OptionalLabelColumnNames,
    UnlabeledColumnNames,
    check_labels,
)
from raycl.data.discovery import check_no_splits, check_output_is_outside, find_source
from raycl.data.embeddings import check_embeddings
from raycl.data.sampler import batch_counts
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError
from raycl.gpus import are_missing, check_gpus
from raycl.lease import Lease, check_is_kept, writing
from raycl.models.registry import (
    HUGGING_FACE,
    OWN_NETWORK,
    SPEC,
    TOKENIZER,
    check_encoder_name,
    trained_own_network,
)
from raycl.provenance import save_command_line
from raycl.records import CONFIG, DATA, read_object, write_result
from raycl.storage import Place, absolute, is_in_copy_of_job, repeated
from raycl.tokenization import Vocabulary
from raycl.tracking.trackers import check_trackers

# The settings that a resumed run may change: resources, checkpoints, monitoring and logging. It may also
# extend the last stage and append further stages.
MAY_CHANGE = re.compile(
    r"workers|min_workers|gpu|accelerator|autoscaling|cpus_per_worker|stages\.\d+\.(workers|chunk_size|cached_chunks|activation_checkpoint_every)|"
    r"momentum_encoder\.(location|actors|min_actors|cpus_per_actor|gpus_per_actor|node_label|ahead|publish_every|max_age)|"
    r"checkpoints\..*|monitor\..*|tracking\..*|data\.(cache|max_invalid_fraction)|"
    r"bank\.(name|detached|max_staleness|timeout_s)|"
    r"negatives\.mined\.(actors|min_actors|cpus_per_actor|gpus_per_actor|node_label|refresh)|log_every_steps|max_failures"
)
# They change rounding, or are in the hashes of older runs.
_HASHED = re.compile(
    r"stages\.\d+\.(chunk_size|cached_chunks|activation_checkpoint_every)|data\.max_invalid_fraction|bank\.name"
)
# These may be changed, but not added or removed.
_ADDRESSES = re.compile(r"negatives\.guide\.(query|document)|text\.corpus|evaluation\.data")


@final
@dataclass(frozen=True, kw_only=True)
class ValidatedRun:
    """A run whose data exist and whose output has no other writer; ``sources`` is empty for Ray Datasets."""

    config: RunConfig
    output: Place
    lease: Lease
    resumed: bool
    sources: tuple[Source, ...]
    corpus: Source | None = None
    evaluation: Source | None = None


@contextlib.contextmanager
def validate_run(
    config: RunConfig,
    *,
    output: str,
    resume: bool,
    data: Sequence[str] = (),
    sources: Sequence[Source] = (),
    own_encoder: bool = False,
    address: str | None = None,
) -> Iterator[ValidatedRun]:
    """Check names, GPUs, output and data, and hold the lease of the output in the context.

    ``sources`` are the data sets at the addresses ``data``, if they were found already. ``own_encoder`` means that a module replaces
    the encoder of the configuration. Raises ``ConfigError``, ``DataError`` or ``StorageError``.
    """
    _check_encoder_names(config, own_encoder=own_encoder)
    config = with_absolute_model(config)
    if config.gpu and not config.autoscaling and are_missing(address):
        check_gpus(max(config.worker_range(stage)[0] for stage in config.stages), 0)
    check_trackers(config)
    if config.data.cache == "stream":
        check_streamed(config)
    place = Place(absolute(output))
    check_is_kept(place)
    is_new = not (place / CONFIG).exists()
    if is_new:  # runs of older versions may lie in the data
        check_output_is_outside(output, data)
    with writing(place) as lease:
        check_output(config, place, resume=resume)
        if not own_encoder and trained_own_network(place):
            raise ConfigError(
                f"the run trained a network of your own, and --resume would build {config.encoder.name}; pass the network as "
                "encoder= to raycl.train, or give another --output"
            )
        if data:
            _check_repeated(data)
            check_data_sets(config, len(data))
            sources = sources or find_sources(config, data)
            for source in sources:
                check_pairs(config, source.columns)
                if is_new:  # older versions trained on them
                    check_no_splits(source)
            check_has_labels(config, sources[0].has_labels, sources[0].ignored_label)
            check_sizes(config, {source.uri: source.num_rows for source in sources})
        check_guide(config)
        yield ValidatedRun(
            config=config,
            output=place,
            lease=lease,
            resumed=resume,
            sources=tuple(sources),
            corpus=find_corpus(config),
            evaluation=find_evaluation_rows(config, sources),
        )


def with_absolute_model(config: RunConfig) -> RunConfig:
    """Return the configuration with the absolute path of its pretrained model, so that the saved run loads in any folder.

    A path in the working folder of a Ray job is kept, since Ray deletes that copy of the submitted folder.
    """
    section = "text_encoder" if config.data.kind == "image_text" else "encoder"
    encoder = getattr(config, section)
    if not (config.has_texts and encoder.name.startswith(HUGGING_FACE)):
        return config
    path = absolute(encoder.name.removeprefix(HUGGING_FACE))
    if is_in_copy_of_job(path):
        return config
    name = HUGGING_FACE + path
    return config.model_copy(update={section: encoder.model_copy(update={"name": name})})


def _check_encoder_names(config: RunConfig, *, own_encoder: bool) -> None:
    kind = config.data.kind
    if not own_encoder:
        check_encoder_name(config.encoder.name, is_text=kind in ("text", "pairs"))
    for name, value, unset in (
        ("whitening", config.encoder.whitening, "null"),
        ("freeze_patches", config.encoder.freeze_patches or None, "false"),
    ):
        if own_encoder and value is not None:
            raise ConfigError(
                f"encoder.{name} acts only with a network that raycl builds by its name, and encoder= is another; "
                f"set encoder.{name}={unset}"
            )
    if kind == "image_text":
        check_encoder_name(config.text_encoder.name, is_text=True, key="text_encoder.name")


def _check_repeated(data: Sequence[str]) -> None:
    if twice := repeated(data):
        raise ConfigError(
            f"--data {twice} is given twice; give it once, and raise its number in data.weights"
        )


def check_streamed(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a setting needs all rows before training, which streamed data do not have."""
    settings = {
        "logq_correction": any(stage.logq_correction != "none" for stage in config.stages),
        "negatives.guide": config.negatives.guide.query is not None,
    }
    if names := [name for name, is_set in settings.items() if is_set]:
        needs, it = ("needs", "it") if len(names) == 1 else ("need", "them")
        raise ConfigError(
            f"{' and '.join(names)} {needs} the ids of all rows before training, which streamed data do not have; "
            f"set data.cache=materialize, or remove {it}"
        )
    negatives, kind = config.negatives, config.data.kind
    if negatives.mined.num == 0:
        return
    if kind == "image_text":
        raise ConfigError(
            "negatives.mined embeds all images again and again, which streamed data do not keep; set "
            "data.cache=materialize, or remove it"
        )
    if not (negatives.in_batch or (negatives.explicit and kind == "pairs")):
        raise ConfigError(
            "negatives.mined finds no negatives in streamed data before its first table, and negatives.in_batch false "
            "leaves no others; set negatives.in_batch=true, or data.cache=materialize"
        )


def check_data_sets(config: RunConfig, number: int) -> None:
    """Raise ``ConfigError`` unless the settings fit this number of data sets."""
    weights = config.data.weights
    if weights is not None and number == 1:
        raise ConfigError("data.weights acts only with several data sets (--data A --data B); remove it")
    if weights is not None and len(weights) != number:
        raise ConfigError(
            f"data.weights has {len(weights)} numbers, and there are {number} data sets; give one per data set"
        )
    if number > 1 and config.data.cache == "stream":
        raise ConfigError(
            f"data.cache=stream reads one data set, and there are {number}; set data.cache=materialize"
        )
    if number > 1 and config.negatives.guide.query is not None:
        raise ConfigError(
            f"negatives.guide has the ids of one data set, and there are {number}; give one, or remove it"
        )
    if number > 1 and config.negatives.mined.num > 0:
        raise ConfigError(
            f"negatives.mined searches the documents of one data set, and there are {number}; give one, or remove it"
        )
    if number > 1 and config.negatives.store != "none":
        raise ConfigError(
            f"negatives.store {config.negatives.store} would keep rows of all {number} data sets, and the negatives "
            "of a batch come from one; give one data set, or set negatives.store=none"
        )


def check_pairs(config: RunConfig, columns: ColumnNames) -> None:
    """Raise ``DataError`` if pairs have labels and negatives or weights, no negatives at all, or no ids for a guide."""
    if config.data.kind != "pairs":
        return
    check_labels(columns)
    check_negatives(config, columns, streamed=config.data.cache == "stream")
    if config.negatives.guide.query is not None:
        id_columns(columns, explicit=bool(config.negatives.explicit))


def check_negatives(config: RunConfig, columns: ColumnNames, *, streamed: bool) -> None:
    """Raise ``DataError`` if the first step of a run on pairs finds no negatives in the batch, the data or a table."""
    negatives = config.negatives
    if negatives.in_batch or negatives.store != "none" or columns.negatives or columns.label:
        return
    if config.data.kind == "pairs" and (streamed or negatives.mined.num == 0):
        until = " before the first table of negatives.mined" if negatives.mined.num else ""
        raise DataError(
            f"negatives.in_batch false leaves only explicit negatives{until}, and the data have no column of them (only "
            f"{', '.join(columns.asked.values())}); name it with --set data.columns.negatives=NAME, or set "
            "negatives.in_batch=true"
        )


def id_columns(columns: ColumnNames, *, explicit: bool) -> list[str]:
    """Return the columns of decoded rows by which a guide finds embeddings, queries first.

    ``explicit`` includes the explicit negatives. Raises ``DataError`` if the data have no ids.
    """
    roles = ["query_id", "document_id"]
    if explicit and columns.negatives is not None:
        roles.append("negative_ids")
    for role in roles:
        if getattr(columns, role) is None:
            raise DataError(
                f"negatives.guide finds embeddings by id, and the data have no {role}; "
                f"name the column with --set data.columns.{role}=NAME"
            )
    return [f"{role}.id" for role in roles]


def check_guide(config: RunConfig) -> None:
    """Raise ``DataError`` unless the folders of a guide, if the run has one, hold ids and vectors."""
    for role, uri in config.negatives.guide.folders(config.data.kind).items():
        if uri is not None:
            check_embeddings(uri, role)


def check_has_labels(config: RunConfig, has_labels: bool, ignored_label: str = "") -> None:
    """Raise ``ConfigError`` if a loss or a setting needs labels and the samples have none."""
    if config.needs_labels and not has_labels:
        cause = f"column 'label' holds {ignored_label}" if ignored_label else "the samples have none"
        raise ConfigError(
            f"{config.needs_labels} needs labels, but {cause}; put images in a folder per class, or "
            "name the column with --set data.columns.label=NAME"
        )


def check_sizes(config: RunConfig, rows: Mapping[str, int]) -> None:
    """Raise if a data set has no batch of a stage; ``rows`` are the numbers of rows by data set."""
    for number, stage in enumerate(config.stages):
        size = stage.batch_size
        for name, num_rows in rows.items():
            if num_rows < size:
                where = f" in {name}" if len(rows) > 1 else ""
                lower = "lower --batch-size" if number == 0 else "set it lower"
                raise DataError(
                    f"a batch of {size} rows (stages.{number}.batch_size) is larger than the {num_rows} rows "
                    f"to train on{where}; {lower} or give more data"
                )
        counts = batch_counts([num_rows // size for num_rows in rows.values()], config.data.weights)
        for name, count in zip(rows, counts, strict=True):
            if count == 0:
                raise ConfigError(
                    f"data.weights gives {name} none of the {sum(counts)} batches of an epoch; raise its weight"
                )


def check_classes(config: RunConfig, label: NDArray[np.int64]) -> Counter[str]:
    """Return how many training rows ``data.samples_per_class`` never draws, by cause.

    ``label`` are the labels of all training rows. Raises ``ConfigError`` if a loss that needs labels finds no
    two rows of a class, or the classes do not fill a batch.
    """
    _, sizes = np.unique(label[label >= 0], return_counts=True)
    name = config.needs_labels
    if sizes.max(initial=0) < 2:
        raise ConfigError(
            f"{name} finds no two samples of a class among {len(label)} training samples ({len(sizes)} classes); "
            "name the column of the classes with --set data.columns.label=NAME"
        )
    group = config.data.samples_per_class
    if group is None:
        return Counter()
    batch_size, is_drawn = max(stage.batch_size for stage in config.stages), sizes >= group
    if np.count_nonzero(is_drawn) < batch_size // group:
        raise ConfigError(
            f"a batch of {batch_size} needs {batch_size // group} classes of at least {group} samples "
            f"(data.samples_per_class), and {np.count_nonzero(is_drawn)} of the {len(sizes)} classes have as many; "
            "choose a smaller batch_size, or another data.samples_per_class"
        )
    too_small, unlabeled = sizes[~is_drawn].sum(), np.count_nonzero(label < 0)
    return +Counter(
        {f"in a class of fewer than {group} samples": int(too_small), "without a label": int(unlabeled)}
    )


def describe_unlabeled(config: RunConfig, label: NDArray[np.int64]) -> list[str]:
    """Return a line about the training rows without a label that a loss of classes uses, if there are any.

    ``data.samples_per_class`` never draws such rows. ``label`` are the labels of all training rows.
    """
    unlabeled = np.count_nonzero(label < 0)
    if unlabeled == 0 or config.data.samples_per_class is not None:
        return []
    return [
        f"{unlabeled:,} of {len(label):,} training samples have no label: their only positives in {config.needs_labels} "
        "are their own views"
    ]


def column_names(config: RunConfig) -> ColumnNames:
    """Return the columns to read; columns of other kinds of samples, and unused negatives, are ignored."""
    named = config.data.columns.model_dump()
    unused = {role for role in named if why_inactive(config, f"data.columns.{role}")}
    if config.negatives.explicit is False:
        return ColumnNamesWithoutNegatives(**named | dict.fromkeys({*unused, "negatives", "negative_ids"}))
    has_other_labels = config.evaluation.data is not None and not config.has_two_towers
    if has_other_labels and not config.needs_labels and named["label"] is not None:
        return OptionalLabelColumnNames(**named | dict.fromkeys(unused))
    return ColumnNames(**named | dict.fromkeys(unused))


def find_sources(config: RunConfig, data: Iterable[str]) -> tuple[Source, ...]:
    """Find the data sets of a run, with the columns that it reads; raises ``DataError`` or ``StorageError``."""
    return tuple(find_source(uri, column_names(config)) for uri in data)


def find_corpus(config: RunConfig) -> Source | None:
    """Find the texts of ``text.corpus``, in a column ``text`` or in the run's own columns of texts."""
    if config.text.corpus is None:
        return None
    named = {role: name for role, name in column_names(config).contents.items() if role != "image"}
    if "text" not in named.values():
        named["text"] = "text"
    return find_source(config.text.corpus, CorpusColumnNames(**{"image": None, **named}))


def find_evaluation_rows(config: RunConfig, sources: Sequence[Source]) -> Source | None:
    """Find the rows of ``evaluation.data``, which are labeled or pairs; the run trains on ``sources``."""
    uri = config.evaluation.data
    if uri is None:
        return None
    unused = dict.fromkeys(("negatives", "negative_ids", "weight"))
    kind = ColumnNamesWithoutNegatives if config.data.kind == "pairs" else ColumnNames
    if config.data.kind == "image_text":
        kind, unused = UnlabeledColumnNames, unused | {"label": None}
    named = {**vars(column_names(config)), "label": config.data.columns.label}
    source = find_source(uri, kind(**named | unused))
    check_no_splits(source)
    trained = {file for each in sources for file in each.files}
    if shared := next((file for file in source.files if file in trained), None):
        raise ConfigError(
            f"evaluation.data ({uri}) has the file {shared}, and the run trains on it; give other rows, or remove "
            "evaluation.data to hold out some"
        )
    if not config.has_two_towers and not source.has_labels:
        cause = f"column 'label' holds {source.ignored_label}" if source.ignored_label else "there are none"
        raise DataError(
            f"the periodic kNN needs labels in evaluation.data ({uri}), but {cause}; put images in a folder per class, or name "
            "the column with --set data.columns.label=NAME"
        )
    return source


def check_output(config: RunConfig, output: Place, *, resume: bool) -> None:
    """Check that the output is writable; an earlier run there requires ``resume`` and the same settings."""
    if (output / CONFIG).exists():
        if not resume:
            raise ConfigError(
                f"{output} holds an earlier run; give another output, or continue it with --resume "
                "(resume=True in Python)"
            )
        _check_unchanged(_saved_config(output), config)
    output.check_writable()


def num_stages_so_far(output: Place) -> int:
    """Return the number of stages of the run in the output, 0 without one."""
    return len(_saved_config(output).stages) if (output / CONFIG).exists() else 0


def _saved_config(output: Place) -> RunConfig:
    saved = output / CONFIG
    return config_from_yaml(saved.read_text(), name=saved.uri, trained=True)


def _check_unchanged(saved: RunConfig, config: RunConfig) -> None:
    """Refuse to resume with settings that would change the views or weights of the rest of the run."""
    last = len(saved.stages) - 1
    if len(config.stages) <= last:
        raise ConfigError(
            f"the run has {last + 1} stages, and --resume got only {len(config.stages)}; repeat all of them "
            "(further ones may follow), or give another --output"
        )
    if config.learn_temperature and (saved.first_bias is None) != (config.first_bias is None):
        raise ConfigError(
            "--resume would add or remove a learned bias, a parameter of the saved optimizer, which only loss siglip "
            "has; give another --output"
        )
    longer = re.compile(rf"stages\.{last}\.(epochs|steps)")
    added = tuple(f"stages.{index}." for index in range(last + 1, len(config.stages)))
    for key, (before, now) in differences(saved, config).items():
        if key == "precision" and saved.tower_precision == config.tower_precision:
            continue
        if key == "bank.name" and saved.bank.detached:
            raise ConfigError(
                f"--resume would change bank.name from {before!r} to {now!r} and leave the detached bank of the run behind; "
                "repeat the name"
            )
        if MAY_CHANGE.fullmatch(key) or longer.fullmatch(key) or key.startswith(added):
            continue
        if (_ADDRESSES.fullmatch(key) and None not in (before, now)) or _name_of_model(before, now):
            continue
        # A setting without effect in one of the runs follows from another change. A learned temperature does not:
        # it is a parameter of the saved optimizer.
        if key == "learn_temperature" or not (why_inactive(saved, key) or why_inactive(config, key)):
            raise ConfigError(
                f"--resume would change {key} from {before!r} to {now!r}; "
                f"repeat the flags of the first run, give its {CONFIG} in place of the recipe, or give another --output"
            )


def _name_of_model(*encoders: Any) -> str | None:
    """Return the name of the folder of a pretrained model if all values are encoders with one of this name.

    The folder may be another copy: the weights and the tokenizer come from the run.
    """
    paths = [str(each).removeprefix(HUGGING_FACE).rstrip("/") for each in encoders]
    names = {posixpath.basename(path) for path in paths}
    are_models = all(str(each).startswith(HUGGING_FACE) for each in encoders)
    return names.pop() if are_models and len(names) == 1 else None


def hash_of_settings(config: RunConfig) -> str:
    """Return the SHA-256 of the settings that determine the losses of steps; a longer last stage changes it."""
    fixed = {
        key: _name_of_model(value) or value
        for key, value in leaves(config).items()
        if _HASHED.fullmatch(key) or not MAY_CHANGE.fullmatch(key)
    }
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()


def check_same_data(output: Place, now: dict[str, Any]) -> None:
    """Refuse to resume on other rows, or on the same rows in another order.

    The same rows at another address, such as a copy in a nearer bucket, are accepted. ``weights``, the fingerprints of the
    weights of rows by data set, are compared if both have them. Raises ``DataError`` for a damaged ``data.json``.
    """
    if not (output / DATA).exists():
        return
    before = read_object(output / DATA)
    if missing := sorted({"data", "num_rows", "streamed"} - before.keys()):
        raise DataError(
            f"{output / DATA} is damaged: it has no {missing[0]}; restore it, or give another --output"
        )
    rows, now_rows = (each.get("rows_per_data_set") for each in (before, now))
    if rows != now_rows:
        raise ConfigError(
            f"the run began with {_described(rows)}, and --resume got {_described(now_rows)}; "
            "give the same data sets in the same order, or another --output"
        )
    if before["num_rows"] != now["num_rows"]:
        raise ConfigError(
            f"the run began with {before['num_rows']} rows ({before['data'] or 'a dataset'}), and --resume got "
            f"{now['num_rows']} ({now['data'] or 'a dataset'}); give the same data, or another --output"
        )
    if "files" in before and "files" in now and before["files"] != now["files"]:
        raise ConfigError(
            f"the files in {now['data']} differ from the files that the run began with, so their rows would have "
            "other ids; restore the files, or give another --output"
        )
    if lost := set(before.get("classes") or ()) - set(now.get("classes") or ()):
        raise ConfigError(
            f"the run began with a class {min(lost)!r}, and {now['data'] or 'the dataset'} has none of that name now (an "
            "earlier version read an empty label, and 1.0 in CSV, as a name); give the same data, or another --output"
        )
    if before["streamed"] != now["streamed"]:
        raise ConfigError(
            f"the data were {_kept(before)} and would be {_kept(now)} on this cluster, in another order; "
            "set data.cache to materialize or stream, as at first, or give another --output"
        )
    _check_same_contents(before, now)
    if now["streamed"] and "workers" in before:
        raise ConfigError(
            "the run began with an earlier version of raycl, which streamed the rows in another order; "
            "give another --output"
        )


def _check_same_contents(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume with other weights, other rows to evaluate, or a stream in another order."""
    changed = {key for key in before.keys() & now.keys() if before[key] != now[key]}
    if "fragments" in changed:
        raise ConfigError(
            f"the rows of {now['data']} are in other files or parts of files than when the run began, so the stream would "
            "have another order; give the files of then, or another --output"
        )
    if "weights" in changed:
        raise ConfigError(
            f"the run began with other weights of rows than there are now in {now['data'] or 'the dataset'}; "
            "give the same data, or another --output"
        )
    if "evaluation" in changed:
        raise ConfigError(
            "the run began with other rows or classes in evaluation.data than there are now; give the same rows, or another "
            "--output"
        )


def describe_data(
    data: Sequence[str],
    rows: Sequence[int],
    classes: Any,
    *,
    streamed: bool,
    label_names: Sequence[str] | None = None,
    files: Sequence[str | None] = (),
    fragments: Sequence[str] = (),
    evaluation: Source | None = None,
    own_network: bool = False,
) -> dict[str, Any]:
    """Return the content of ``data.json``, which a resumed run is compared with.

    ``rows`` are the numbers of rows of each data set, and ``data`` their addresses, if they have any. ``label_names``
    are the names of integer labels, for display. ``files`` are the fingerprints of the files, of sources alone, and
    ``fragments`` those of their parts, which matter to a stream.
    ``evaluation`` are the rows of ``evaluation.data``. ``own_network`` marks a run whose network no name builds.
    """
    validation = {}
    if evaluation is not None:
        validation = {
            "num_rows": evaluation.num_rows,
            "classes": evaluation.classes and list(evaluation.classes),
            "files": evaluation.files_fingerprint,
        }
    return {
        "data": None if not data else data[0] if len(data) == 1 else list(data),
        "num_rows": sum(rows),
        **({"rows_per_data_set": list(rows)} if len(rows) > 1 else {}),
        "streamed": streamed,
        **({"files": list(files)} if any(files) else {}),
        **({"fragments": list(fragments)} if streamed and fragments else {}),
        "classes": classes,
        **({"label_names": list(label_names)} if label_names else {}),
        **({"evaluation": validation} if validation else {}),
        **({OWN_NETWORK: True} if own_network else {}),
    }


def save_run_files(
    output: Place, config: RunConfig, described: dict[str, Any], vocabulary: Vocabulary | None
) -> None:
    """Write the files that a resumed run reads, and delete the encoder's spec until the run ends."""
    # First: a finished run that is started again is no longer finished, whenever this process ends.
    write_result(output, {"status": "running"})
    (output / CONFIG).write_text(config_to_yaml(config))
    (output / DATA).write_text(json.dumps(described) + "\n")
    save_command_line(output)
    if vocabulary is not None:
        (output / TOKENIZER).write_text(vocabulary.tokenizer.to_json())
    # Last: it stays if the disk is full. From now on, the encoder is the one of the last checkpoint.
    (output / SPEC).delete()


def _described(rows: Sequence[int] | None) -> str:
    """Describe the data sets of a run by their numbers of rows; None stands for a single one."""
    return "one data set" if rows is None else f"data sets of {', '.join(map(str, rows))} rows"


def _kept(described: dict[str, Any]) -> str:
    return "streamed" if described["streamed"] else "held in memory"
