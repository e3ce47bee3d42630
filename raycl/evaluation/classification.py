"""Evaluation by labels: kNN and linear probe on representations, with raw pixels as the baseline."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from raycl.data.columns import ColumnNames
from raycl.data.discovery import check_no_splits, find_source
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset
from raycl.data.labels import NO_LABEL, label_numbers
from raycl.data.sources import Source
from raycl.data.split import Holdout
from raycl.display import EvaluationResult
from raycl.errors import ConfigError, DataError
from raycl.evaluation.embed import BASELINE_SIZE, are_gray, raw_pixels
from raycl.evaluation.knn import knn_accuracy
from raycl.gpus import available_cores
from raycl.inference.embed import columns_for, embedded_tables, formats_of, representations, row_bytes
from raycl.inference.encoder import read_encoders
from raycl.inference.preflight import allowed_invalid_fraction, check_options
from raycl.inference.reading import (
    connect_unless_small,
    counted_rows,
    counting_decoder,
    read_images,
    report_invalid,
    report_unread,
)
from raycl.models.encoder_io import ImageEncoder
from raycl.models.specs import ImageEncoderSpec
from raycl.training.process import prepared_process

Measure = Literal["knn", "linear"]
# Raw pixels have thousands of columns, so a larger set is sampled for the baseline.
MAX_BASELINE_ROWS = {"knn": 50_000, "linear": 10_000}


@final
@dataclass(frozen=True, kw_only=True)
class LabeledSet:
    """Representations or raw pixels [num_rows, dim] and labels [num_rows]."""

    values: Tensor
    label: Tensor


Score = Callable[[LabeledSet, LabeledSet], float]


def evaluate(
    measure: Measure,
    *,
    run: str,
    train: str,
    test: str,
    columns: ColumnNames | None = None,
    network: nn.Module | None = None,
    k: int | None = None,
    temperature: float | None = None,
    labels_per_class: int | None = None,
    baseline: bool = True,
    gpu: bool = False,
    max_invalid_fraction: float | None = None,
    seed: int | None = None,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> EvaluationResult:
    """Classify ``test`` by the labels of ``train``, with the encoder of ``run``.

    ``k`` (200 by default) and ``temperature`` (0.07) are of the measure ``knn``, ``labels_per_class`` (all labels) and
    ``seed`` (0) of ``linear``. ``max_invalid_fraction`` is the run's by default.

    Returns ``measure``, ``top1``, ``num_train``, ``num_test`` and ``baseline``: the same measure on raw pixels
    of at most 32 per side, with the mean image subtracted, of a sample of large sets. It is left out, with a line on
    stderr, if the sample has too few labels. Raises ``DataError``
    if a set has no labels or names classes that ``train`` lacks, ``StorageError`` if the run has no encoder,
    ``ConfigError`` for an unknown measure or an option of the other one. Test rows of a numbered class without training
    rows count as errors, with a line on stderr.
    """
    if measure not in get_args(Measure):
        raise ConfigError(f"unknown measure {measure!r}; there are {' and '.join(get_args(Measure))}")
    asked = {"k": k, "temperature": temperature, "labels_per_class": labels_per_class, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    check_options(measure, chosen)
    (saved,) = read_encoders(run, ["query"], network=network)
    encoder = saved.build(network)
    columns = columns_for(encoder, columns)
    sources = {name: find_source(uri, columns) for name, uri in (("train", train), ("test", test))}
    for source in sources.values():
        check_no_splits(source)
    _check_labels(sources, labels_per_class)
    report_unread({each.uri: each for each in sources.values()}.values(), quiet=quiet)
    _warn_of_equal_sets(sources, quiet=quiet)
    num_rows = sum(source.num_rows for source in sources.values())
    connect_unless_small(num_rows * row_bytes(encoder), gpu=gpu, address=address, debug=debug)

    def score(train_set: LabeledSet, test_set: LabeledSet) -> float:
        sets = (train_set.values, train_set.label, test_set.values, test_set.label)
        if measure == "knn":
            return knn_accuracy(*sets[2:], *sets[:2], **chosen)
        from raycl.evaluation.linear import linear_accuracy  # scikit-learn takes a second to import

        return linear_accuracy(*sets, label_name=sources["train"].label_name, **chosen)

    kept = {name: list[pa.Table]() for name in sources}

    def represent(name: str) -> LabeledSet:
        with counting_decoder(
            formats_of(encoder),
            num_rows=sources[name].num_rows,
            title=f"embedding the {name} set",
            max_invalid_fraction=allowed_invalid_fraction(run, max_invalid_fraction),
            quiet=quiet,
        ) as decoder:
            has_pixels = isinstance(encoder, ImageEncoder) and encoder.spec.image_format() == _pixels_of(
                encoder.spec
            )
            decoded = kept[name] if baseline and has_pixels else None
            tables = embedded_tables(
                sources[name], decoder, saved, encoder, gpu=gpu, network=network, kept=decoded
            )
            rows = counted_rows(decoder)
        report_invalid(f"the {name} set", rows, quiet=quiet)
        _report_missing(name, _labels(tables), quiet=quiet)
        return _labeled(representations(tables, encoder.spec.representation_dim), _labels(tables))

    with prepared_process(available_cores()):  # which keeps freed memory, and multiplies faster on some CPUs
        train_set, test_set = represent("train"), _with_train_classes(sources, represent("test"))
        _check_classes(sources["train"], train_set.label, test_set.label, quiet=quiet)
        result = EvaluationResult({"measure": measure, "top1": score(train_set, test_set)})
        if measure == "linear" and labels_per_class is not None:
            result["labels_per_class"] = labels_per_class
        result.update({"num_train": len(train_set.label), "num_test": len(test_set.label)})
        if baseline and isinstance(encoder, ImageEncoder):
            pixels = partial(
                _pixel_baseline, sources, kept, encoder.spec, score, measure=measure, quiet=quiet
            )
            result |= _baseline(pixels, train_set.label, labels_per_class, sources["train"])
    return result


def _check_labels(sources: dict[str, Source], labels_per_class: int | None = None) -> None:
    for name, source in sources.items():
        if not source.has_labels:
            raise DataError(f"the {name} set {source.uri} has no labels{_cause_and_remedy(source)}")
        if not _has_any_label(source):
            raise DataError(
                f"no row of the {name} set {source.uri} has a label in column {source.columns.label!r}; fill the column, "
                "or name another with --set data.columns.label=NAME"
            )
    _check_same_kind(sources)
    train, test = (sources[name].classes for name in ("train", "test"))
    unknown = sorted(set(test or ()) - set(train or ()))
    if unknown:
        raise DataError(f"the test set has classes that the training set lacks: {', '.join(unknown[:5])}")
    names = zip(*(sources[name].label_names or () for name in ("train", "test")), strict=False)
    for number, (known, other) in enumerate(names):
        if known != other:
            raise DataError(
                f"label {number} is {known} in the training set and {other} in the test set; give both the same numbers, "
                "as align_labels_with_mapping of datasets does, or names in place of numbers"
            )
    if labels_per_class is not None:
        from raycl.evaluation.linear import check_class_sizes  # scikit-learn takes a second to import

        label = sources["train"].labels()
        check_class_sizes(label[label != NO_LABEL], labels_per_class, sources["train"].label_name)


def _check_same_kind(sources: dict[str, Source]) -> None:
    """Refuse labels that are text in one set and integers in the other."""
    texts = {name: source.classes for name, source in sources.items() if source.classes}
    if len(texts) == 1:
        [(text, classes)] = texts.items()
        (number,) = sources.keys() - {text}
        shown = next((each for each in classes if not re.fullmatch(r"-?\d+", each)), classes[0])
        raise DataError(
            f"labels of the {text} set {sources[text].uri} are text, such as {shown!r}, and those of the {number} set are "
            "integers; give both the same kind of labels"
        )


def _cause_and_remedy(source: Source) -> str:
    """Return why a source has no labels, if its column or its folders show it, and what to do."""
    paths = [path.split("/") for each in source.fragments for path in each.paths]
    beside = [names[0] for names in paths if len(names) == 1]
    folders = {names[0] for names in paths if len(names) > 1}
    if len(folders) == 1:
        return f": {min(folders)!r} is its only class folder; give images of two classes or more"
    if beside and folders:
        return f": {beside[0]} lies beside its class folders; move all images into class folders"
    held = f": column 'label' holds {source.ignored_label}" if source.ignored_label else ""
    return f"{held}; put images in a folder per class, or name the column with --set data.columns.label=NAME"


def _has_any_label(source: Source) -> bool:
    """Return whether a row has a label; reads the column of integers as far as the first one."""
    column = source.columns.label
    if source.classes is not None or column is None:
        return source.classes != ()
    tables = (table for each in source.fragments for _, table in source.tables(each, [column]))
    return any((label_numbers(table[column], None) != NO_LABEL).any() for table in tables)


def _check_classes(train: Source, known: Tensor, label: Tensor, *, quiet: bool) -> None:
    """Refuse a single class, and print the number of test rows of numbered classes without a training row."""
    distinct = known.unique().tolist()
    if len(distinct) == 1:
        raise DataError(
            f"all labels of the training set are {train.label_name(distinct[0])}; give rows of two classes or more, "
            "and number them from 0, since a negative label is a missing one"
        )
    unknown = label[~torch.isin(label, known)]
    if len(unknown) and not quiet:
        names = ", ".join(map(train.label_name, unknown.unique()[:5].tolist()))
        print(
            f"raycl: {len(unknown):,} of {len(label):,} rows of the test set are of classes that the training set lacks "
            f"({names}) and count as errors",
            file=sys.stderr,
        )


def _report_missing(name: str, label: Tensor, *, quiet: bool) -> None:
    missing = int((label == NO_LABEL).sum())
    if missing and not quiet:
        print(
            f"raycl: {missing:,} of {len(label):,} rows of the {name} set have no label (empty, null or negative) and are skipped",
            file=sys.stderr,
        )


def _warn_of_equal_sets(sources: dict[str, Source], *, quiet: bool) -> None:
    test = sources["test"].uri
    if sources["train"].uri == test and not quiet:
        print(
            f"train and test are both {test}: each test row is a training row, so the accuracy means nothing; "
            "give a test set of other rows",
            file=sys.stderr,
        )


def _with_train_classes(sources: dict[str, Source], test_set: LabeledSet) -> LabeledSet:
    """Number the test set's classes as in the training set."""
    train, test = sources["train"].classes, sources["test"].classes
    if train is None or test is None:
        return test_set
    number = torch.tensor([train.index(name) for name in test])
    return LabeledSet(values=test_set.values, label=number[test_set.label])


def _baseline(
    pixels: Callable[..., dict[str, Any]], label: Tensor, labels_per_class: int | None, train: Source
) -> dict[str, Any]:
    """Return the baseline of a sample with enough labels of each class; nothing, with a line, if it has too few."""
    num_train = 0
    if labels_per_class is not None:
        num_train = min(_num_rows_with(labels_per_class, label, train.num_rows), MAX_BASELINE_ROWS["knn"])
    try:
        return {"baseline": pixels(num_train=num_train)}
    except DataError as error:
        print(f"raycl: no baseline of raw pixels: {error}", file=sys.stderr)
        return {}


def _num_rows_with(labels_per_class: int, label: Tensor, num_rows: int) -> int:
    """Return how many rows of all ``num_rows`` have so many labels of each class, drawn at random, but for one in millions."""
    fewest = int(label.unique(return_counts=True)[1].min())
    return math.ceil(num_rows * (2 * labels_per_class + 20) / fewest)


def _pixel_baseline(
    sources: dict[str, Source],
    kept: dict[str, list[pa.Table]],
    spec: ImageEncoderSpec,
    score: Score,
    *,
    measure: Measure,
    num_train: int = 0,
    quiet: bool,
) -> dict[str, Any]:
    """Return the score of raw pixels; ``kept`` has the decoded rows of each set, if they need not be read again."""
    pixel_format, max_rows = _pixels_of(spec), dict.fromkeys(sources, MAX_BASELINE_ROWS[measure])
    max_rows["train"] = max(max_rows["train"], num_train)
    rows: dict[str, InMemoryDataset] = {}
    for name, source in sources.items():
        sample = Holdout(seed=0, reference=min(1.0, max_rows[name] / source.num_rows)).is_evaluated
        if kept[name]:
            chosen = [table.filter(pa.array(sample(table["sample_id"].to_numpy()))) for table in kept[name]]
            rows[name] = InMemoryDataset(chosen, {"image": pixel_format})
            continue
        rows[name] = read_images(
            source,
            pixel_format,
            keep=sample,
            title=f"reading pixels of the {name} set",
            max_invalid_fraction=1.0,  # checked when the set was embedded
            quiet=quiet,
        )
    # The probe's weight decay acts on each channel, so only kNN is the same with one of equal channels.
    channels = 1 if measure == "knn" and are_gray(*rows.values()) else spec.channels
    train, test = (
        _labeled(raw_pixels(each, channels=channels, size=pixel_format.size), torch.from_numpy(each.label))
        for each in (rows["train"], rows["test"])
    )
    mean = train.values.mean(0)
    train, test = (LabeledSet(values=each.values - mean, label=each.label) for each in (train, test))
    baseline: dict[str, Any] = {"pixels": score(train, _with_train_classes(sources, test))}
    if sources["train"].num_rows > max_rows["train"]:
        baseline["num_train"] = len(train.label)
    return baseline


def _pixels_of(spec: ImageEncoderSpec) -> ImageFormat:
    """Return the format of the raw pixels."""
    return ImageFormat(
        size=min(BASELINE_SIZE, spec.image_size), channels=spec.channels, max_pixels=spec.max_pixels
    )


def _labels(tables: Sequence[pa.Table]) -> Tensor:
    return torch.from_numpy(np.concatenate([table["label"].to_numpy() for table in tables]))


def _labeled(values: Tensor, label: Tensor) -> LabeledSet:
    has_label = label != NO_LABEL
    if len(label) == 0:
        raise DataError("no row of the set could be read; check the images, whose invalid rows are counted")
    if not has_label.any():
        raise DataError("no row of the set has a label; check the label column")
    if has_label.all():  # without a copy
        return LabeledSet(values=values, label=label)
    return LabeledSet(values=values[has_label], label=label[has_label])
