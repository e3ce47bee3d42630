"""The settings of a run that exclude each other; each check returns a message, or None."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycl.config.conditions import why_inactive
from raycl.config.schema import SMALLEST_VIEW, PoolConfig
from raycl.config.stage import Stage
from raycl.loss_specs import LOSSES, MIN_TEMPERATURE, MIXED, join_names, losses_that
from raycl.models.registry import VITS

if TYPE_CHECKING:
    from raycl.config.run import RunConfig


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield a message of one line for each problem of a run."""
    for check in (
        _check_workers,
        _check_views,
        _check_stages,
        _check_sources,
        _check_key_encoders,
        _check_losses,
        _check_temperatures,
        _check_teacher,
        _check_guide,
        _check_mined,
        _check_rollback,
        _check_channels,
    ):
        if problem := check(run):
            yield problem


def _check_workers(run: "RunConfig") -> str | None:
    if run.min_workers is not None and run.min_workers > run.workers:
        return f"min_workers {run.min_workers} is more than workers {run.workers}; give --workers MIN:MAX"
    return None


def _check_stages(run: "RunConfig") -> str | None:
    if not run.stages:
        return "stages is empty; give at least one stage"
    for index, stage in enumerate(run.stages):
        least, most = run.worker_range(stage)
        for workers in range(least, most + 1):
            if problem := _problem_of_stage(run.settled(workers), stage, _range_hint(least, most)):
                # The index is omitted for a single stage, the usual case.
                return problem if len(run.stages) == 1 else f"stage {index}: {problem}"
    return None


def _problem_of_stage(run: "RunConfig", stage: Stage, hint: str) -> str | None:
    """Return the problem of a stage with a fixed number of workers; ``hint`` is about that number."""
    if problem := _check_batch(run, stage):
        return problem + hint
    if run.image_size(stage) > run.data.image_size:
        return (
            f"image_size {stage.image_size} is larger than data.image_size {run.data.image_size}, the size of the "
            "evaluation and of the saved encoder; raise data.image_size, or choose a smaller one"
        )
    if min(run.views_by_size(stage)) < SMALLEST_VIEW:
        return (
            f"image_size {stage.image_size} scales a size of augment.views to {min(run.views_by_size(stage))} pixels; "
            f"choose larger sizes, so that each is at least {SMALLEST_VIEW}"
        )
    size, views = stage.chunk_size, run.local_views(stage)
    if size is not None and size > views:
        return (
            f"chunk_size {size} is larger than a worker's {views} views of a batch of {stage.batch_size}; "
            "remove chunk_size, or choose a smaller one"
        )
    if size is not None and run.batchnorm == "shuffled" and size % run.rows_per_group(stage):
        return (
            f"chunk_size {size} is not a multiple of {run.rows_per_group(stage)}, the rows in a group of shuffled BatchNorm; "
            "choose a multiple, or more batchnorm_groups"
        )
    if run.negatives.store == "queue" and run.negatives.capacity < stage.batch_size:
        return (
            f"negatives.capacity {run.negatives.capacity} is less than a batch of {stage.batch_size}; "
            "a queue must hold at least the keys of one step"
        )
    return None


def _check_batch(run: "RunConfig", stage: Stage) -> str | None:
    workers = run.workers_of(stage)
    if stage.batch_size % workers:
        return (
            f"batch_size {stage.batch_size} does not divide over {workers} workers; "
            "batch_size counts the rows of all workers; choose a multiple"
        )
    if problem := _check_classes(run, stage) or _check_single_rows(run, stage):
        return problem
    groups = max(run.batchnorm_groups, workers)
    if run.batchnorm != "shuffled":
        return None
    if groups % workers:
        return f"batchnorm_groups {groups} do not divide over {workers} workers; choose a multiple"
    if stage.batch_size % groups or stage.batch_size < 2 * groups or groups < 2:
        return (
            f"batch_size {stage.batch_size} does not split into {groups} groups of at least 2 rows for "
            "shuffled BatchNorm, which needs 2 groups or more; set batchnorm_groups or --batch-size"
        )
    return None


def _check_classes(run: "RunConfig", stage: Stage) -> str | None:
    """Check that a batch divides into groups of one class, on each worker, and that its loss allows them."""
    group, rows = run.data.samples_per_class, run.local_batch_size(stage)
    if group is None:
        return None
    if rows % group:
        return (
            f"a worker's {rows} rows of a batch do not divide into groups of data.samples_per_class {group}; "
            f"choose a batch_size that is a multiple of {group * run.workers_of(stage)}"
        )
    if LOSSES[stage.loss].partition:
        return (
            f"loss {stage.loss} takes the other rows of a batch for a random sample of the data, and "
            f"data.samples_per_class {group} draws few classes; remove it, or set loss to dcl and negatives.store to none"
        )
    if stage.batch_size == group:
        return f"data.samples_per_class {group} is the whole batch, which then has one class; choose a larger batch_size"
    return None


def _check_single_rows(run: "RunConfig", stage: Stage) -> str | None:
    """Check that BatchNorm of the projection head, if each worker has its own, gets two rows or more."""
    head, is_local = run.projection_head, run.batchnorm in ("local", "local_view")
    views = 1 if run.batchnorm == "local_view" else min(run.views_by_size(stage).values())
    if not (is_local and head.batchnorm and head.num_layers > 1) or run.local_batch_size(stage) * views > 1:
        return None
    return (
        f"batchnorm {run.batchnorm} normalizes a single row of a worker in the projection head, and needs two; choose a "
        f"batch_size of at least {2 * run.workers_of(stage)}, or set batchnorm to synchronized, layer or group"
    )


def _range_hint(least: int, most: int) -> str:
    """Return a hint for ranges of workers: a batch size that divides over each number."""
    if least == most:
        return ""
    # For 16 numbers it is 720,720 or more, too large for a batch.
    multiple = math.lcm(*range(least, min(most, least + 15) + 1))
    remedy = f"choose a multiple of {multiple}" if multiple <= 100_000 else "choose a narrower MIN:MAX"
    return f" (the run may have any number of workers from {least} to {most}; {remedy})"


def _check_sources(run: "RunConfig") -> str | None:
    """Check where keys and negatives come from."""
    store = run.negatives.store
    if (run.key == "memory_bank") != (store == "memory_bank"):
        return (
            f"key {run.key} is incompatible with negatives.store {store}; "
            "key=memory_bank and negatives.store=memory_bank require each other"
        )
    if run.has_two_towers and run.key != "tower":
        return f"data.kind {run.data.kind} encodes its keys by a tower, got key {run.key}; set key=tower"
    if run.batchnorm == "local_view" and (
        run.key != "tower" or run.has_two_towers or run.has_prediction_head
    ):
        return (
            "batchnorm local_view needs two views of one tower, and keys of this tower without a prediction head; "
            "set it to local"
        )
    if run.batchnorm != "shuffled":
        return None
    if run.key == "memory_bank":
        return (
            "batchnorm shuffled needs two views per sample, and key memory_bank has one; "
            "set batchnorm to synchronized, layer or group"
        )
    if run.data.kind == "text":
        return (
            "batchnorm shuffled needs views of one shape, and texts differ in length; "
            "set it to synchronized, group or layer"
        )
    if run.has_two_towers:
        return (
            "batchnorm shuffled needs two views of one tower, and this run has two towers; set it "
            "to synchronized, group or layer"
        )
    return None


def _check_key_encoders(run: "RunConfig") -> str | None:
    """Check the pool of actors that encodes keys."""
    keys = run.momentum_encoder
    if run.key != "momentum_encoder" or keys.location == "workers":
        return None
    if problem := _problem_of_pool("momentum_encoder", keys):
        return problem
    if 0 < keys.max_age < keys.ahead:
        return (
            f"momentum_encoder.max_age {keys.max_age} is less than momentum_encoder.ahead {keys.ahead}, and a key is "
            "at least so old; lower ahead, or raise max_age"
        )
    if run.data.kind != "image" and run.has_batchnorm:
        return (
            f"momentum_encoder.location actors mixes the rows of batches for batchnorm {run.batchnorm}, got data.kind "
            f"{run.data.kind}; set batchnorm to layer or group"
        )
    return None


def _problem_of_pool(name: str, pool: PoolConfig) -> str | None:
    least, most = pool.actor_range
    if least > most:
        return f"{name}.min_actors {least} is more than {name}.actors {most}; lower it"
    return None


def _check_views(run: "RunConfig") -> str | None:
    given, full = run.augment.views, run.data.image_size
    if given is None or why_inactive(run, "augment.views"):
        return None
    if not given or given[0].count < 2 or given[0].size not in (None, full):
        first = f"count {given[0].count} and size {given[0].size or full}" if given else "no views"
        return (
            f"the first entry of augment.views has {first}; it must give two or more views of "
            f"data.image_size {full}, since every view is compared with these"
        )
    other = max((each.size for each in given if each.size not in (None, full)), default=None)
    if other is not None and other > full:
        return f"augment.views has size {other}, more than data.image_size {full}; choose a smaller size"
    if other is not None and run.encoder.name in VITS:
        return (
            f"augment.views has size {other}, and the position embeddings of {run.encoder.name} fit only "
            f"data.image_size {full}; remove size, or choose a ResNet or a network of your own"
        )
    if run.num_views > 2 and run.batchnorm == "shuffled" and run.key == "tower":
        return (
            f"batchnorm shuffled of a single tower supports two views, got {run.num_views}; "
            "set batchnorm to synchronized, layer or group"
        )
    return None


def _check_losses(run: "RunConfig") -> str | None:
    found = (
        _problem_of_loss(run, stage.loss)
        or _problem_of_prediction(run, stage.loss)
        or _problem_of_prefixes(run, stage)
        or _problem_of_weights(run, stage)
        or _problem_of_lengths(run, stage)
        or _problem_of_drawn(run, stage)
        for stage in run.stages
    )
    return next(filter(None, found), None)


def _check_temperatures(run: "RunConfig") -> str | None:
    """Check the start of a learned temperature, and that stages that share values of one temperature have one."""
    is_learned = run.learn_temperature and not why_inactive(run, "learn_temperature")
    if is_learned and run.stages[0].temperature < MIN_TEMPERATURE:
        return (
            f"stages.0.temperature {run.stages[0].temperature:g} is less than {MIN_TEMPERATURE:g}, the least learned temperature; "
            "raise it, or set learn_temperature=false"
        )
    is_constant = run.negatives.normalizer_momentum is None
    sharing = [
        stage
        for stage in run.stages
        if LOSSES[stage.loss].partition
        or (is_constant and "normalizer_momentum" in LOSSES[stage.loss].settings)
    ]
    temperatures = list(dict.fromkeys(f"{stage.temperature:g}" for stage in sharing))
    if is_learned or len(temperatures) < 2:
        return None
    stored = "partition functions" if LOSSES[sharing[0].loss].partition else "normalizing constant"
    other = "" if LOSSES[sharing[0].loss].partition else ", or set negatives.normalizer_momentum=0.9"
    return (
        f"stages with loss {sharing[0].loss} have temperatures {' and '.join(temperatures)}, and share {stored} "
        f"of one temperature; give them the same temperature{other}"
    )


def _problem_of_weights(run: "RunConfig", stage: Stage) -> str | None:
    """Return a message if rows have weights and the loss, or a hinge mixed into it, does not use them."""
    if run.data.columns.weight is None or (LOSSES[stage.loss].row_weights and not stage.has_hinge):
        return None
    loss = stage.loss if not LOSSES[stage.loss].row_weights else MIXED
    return (
        f"loss {loss} does not weight rows; remove data.columns.weight, or set loss to "
        f"{losses_that(lambda spec: spec.row_weights)} without a hinge_weight"
    )


def _problem_of_lengths(run: "RunConfig", stage: Stage) -> str | None:
    """Return a message if a loss needs random batches and batches have texts of similar lengths."""
    buckets = run.text.length_buckets
    if buckets == 1 or not LOSSES[stage.loss].partition or why_inactive(run, "text.length_buckets"):
        return None
    return (
        f"loss {stage.loss} takes the other rows of a batch for a random sample of the data, and "
        f"text.length_buckets {buckets} gives them similar lengths; set it to 1, or set loss to "
        f"{_without_partition(run)} and negatives.store to none"
    )


def _problem_of_drawn(run: "RunConfig", stage: Stage) -> str | None:
    """Return a message if pairs draw some of their explicit negatives, and the loss assumes all."""
    number = run.negatives.explicit
    if isinstance(number, bool) or stage.logq_correction == "none" or why_inactive(run, "negatives.explicit"):
        return None
    return (
        f"logq_correction {stage.logq_correction} assumes documents drawn by their frequency, and of many explicit "
        f"negatives each pair draws {number}; set it to none, or negatives.explicit=true"
    )


def _problem_of_prefixes(run: "RunConfig", stage: Stage) -> str | None:
    """Return a message if the loss or the embedding does not allow the prefixes of Matryoshka."""
    if stage.matryoshka_dims is None:
        return None
    longest, dim = max(stage.matryoshka_dims), run.projection_head.dim
    if longest > dim:
        return (
            f"matryoshka_dims has {longest}, and the embedding has {dim} numbers; "
            f"remove it, or set projection_head.dim to {longest} or more"
        )
    if "normalizer_momentum" in LOSSES[stage.loss].settings:
        return (
            f"loss {stage.loss} estimates one normalizing constant, which differs between prefixes; "
            "remove matryoshka_dims, or set loss to info_nce"
        )
    if stage.teacher_keys:
        return "teacher_keys compares whole embeddings with the teacher's; remove it, or matryoshka_dims"
    if LOSSES[stage.loss].partition:
        return (
            f"loss {stage.loss} stores one partition function of a sample, which differs between prefixes; "
            f"remove matryoshka_dims, or set loss to {_without_partition(run)} and negatives.store to none"
        )
    return None


def _without_partition(run: "RunConfig") -> str:
    """Return the loss over a batch that replaces a loss with partition functions."""
    return "clip" if run.has_two_towers else "dcl"


def _problem_of_loss(run: "RunConfig", loss: str) -> str | None:
    """Return a message if a loss does not fit the keys and negatives."""
    spec, store, kind, in_batch = LOSSES[loss], run.negatives.store, run.data.kind, run.negatives.in_batch
    if run.key not in spec.keys or store not in spec.stores:
        return (
            f"loss {loss} is incompatible with key {run.key} and negatives.store {store}: it takes "
            f"key {join_names(spec.keys)}, and negatives.store {join_names(spec.stores)}"
        )
    learns_temperature = run.learn_temperature and not why_inactive(run, "learn_temperature")
    if learns_temperature and "normalizer_momentum" in spec.settings:
        return (
            f"loss {loss} estimates its normalizing constant for one temperature; set learn_temperature=false, or loss "
            "to info_nce"
        )
    explicit = kind == "pairs" and run.negatives.explicit
    if explicit and spec.pairs and not spec.explicit_negatives:
        return (
            f"loss {loss} cannot use explicit negatives; set negatives.explicit=false, or loss to "
            f"{losses_that(lambda each: each.pairs and each.explicit_negatives)}"
        )
    is_mined = run.negatives.mined.num > 0 and not why_inactive(run, "negatives.mined")
    if store == "none" and not (in_batch or explicit or is_mined):
        store = ", or a negatives.store" if spec.stored_negatives else ""
        return f"{loss} has no negatives; set negatives.in_batch=true{store}"
    if spec.needs_batch and not in_batch:
        others = losses_that(
            lambda each: each.fits(key=run.key, pairs=run.has_two_towers, store=store, in_batch=False)
        )
        other = f", or loss to {others}" if others else ""
        return f"loss {loss} needs in-batch negatives; set negatives.in_batch=true{other}"
    if run.has_two_towers and not spec.pairs:
        fitting = losses_that(lambda each: each.fits(key=run.key, pairs=True, store=store, in_batch=in_batch))
        return (
            f"loss {loss} compares views of one sample, but data.kind {kind} has pairs; set loss to {fitting}"
        )
    if spec.neighbors and not run.has_prediction_head:
        return f"loss {loss} compares neighbors with predictions; set prediction_head.num_layers to 1, 2 or 3"
    return None


def _problem_of_prediction(run: "RunConfig", loss: str) -> str | None:
    """Return a message if another stage has a prediction head, which this loss does not allow."""
    if LOSSES[loss].predicts or not run.has_prediction_head or why_inactive(run, "prediction_head"):
        return None
    other = "info_nce with hinge_weight 1" if loss == MIXED else "info_nce"
    is_needed = any(LOSSES[stage.loss].neighbors for stage in run.stages)
    or_without = "" if is_needed else ", or prediction_head.num_layers to 0"
    return f"loss {loss} is incompatible with the prediction head of the other stages; set loss to {other}{or_without}"


_SIDES = {"sample_id": "query", "query_id": "query", "document_id": "document"}  # of a guide, by their ids


def _check_teacher(run: "RunConfig") -> str | None:
    if not any(LOSSES[stage.loss].taught for stage in run.stages):
        return None
    if why_inactive(run, "negatives.guide"):
        return f"loss distillation needs negatives.guide, which data.kind {run.data.kind} cannot have; set another loss"
    folders = run.negatives.guide.folders(run.data.kind)
    missing = [f"negatives.guide.{_SIDES[name]}" for name, folder in folders.items() if folder is None]
    return (
        f"loss distillation needs the embeddings of a teacher; set {' and '.join(missing)}"
        if missing
        else None
    )


def _check_guide(run: "RunConfig") -> str | None:
    guide, store = run.negatives.guide, run.negatives.store
    given = guide.folders(run.data.kind)
    missing = [_SIDES[name] for name, folder in given.items() if folder is None]
    if len(missing) == len(given) or why_inactive(run, "negatives.guide"):
        return None
    if missing:
        return f"negatives.guide has no folder of embeddings as {missing[0]}; give query and document, or neither"
    guided = [stage for stage in run.stages if run.uses_guide(stage)]
    is_taught = any(LOSSES[stage.loss].taught for stage in run.stages)
    or_remove = "" if is_taught else ", or remove negatives.guide"
    or_unmasked = ", or negatives.guide.margin to 0" if is_taught and not run.has_two_towers else or_remove
    # Without a teacher, the guide is there to mask.
    for stage in guided if is_taught else run.stages:
        if problem := _problem_of_guided(stage, or_unmasked):
            return problem
    if not guided:
        return (
            f"negatives.guide masks nothing with negatives.guide.margin {guide.margin:g}: both views of a sample have one "
            "embedding, and no other is nearer; set it above 0, such as to 0.1"
        )
    if not run.has_two_towers and run.negatives.mined.num > 0:
        return (
            f"negatives.guide has no embeddings of mined negatives of data.kind {run.data.kind}, got "
            f"negatives.mined.num {run.negatives.mined.num}; set it to 0{or_remove}"
        )
    if store != "none":
        return (
            f"negatives.guide has no embeddings of stored keys, got negatives.store {store}; set it to none"
        )
    return None


def _problem_of_guided(stage: Stage, or_unmasked: str) -> str | None:
    """Return a message if the loss of a stage has no teacher and allows no mask; it ends with ``or_unmasked``."""
    if not LOSSES[stage.loss].guided:
        guided = losses_that(lambda spec: spec.guided and not spec.taught)
        return f"loss {stage.loss} cannot use negatives.guide; set loss to {guided}{or_unmasked}"
    if stage.has_hinge:
        return f"negatives.guide masks no negatives of a hinge; set hinge_weight=0{or_unmasked}"
    if stage.logq_correction == "refined":
        return (
            "logq_correction refined counts the negatives, of which negatives.guide masks some; "
            f"set logq_correction to simple or none{or_unmasked}"
        )
    return None


def _check_mined(run: "RunConfig") -> str | None:
    mined, store = run.negatives.mined, run.negatives.store
    if mined.num == 0 or why_inactive(run, "negatives.mined"):
        return None
    if store != "none":
        return f"negatives.mined.num {mined.num} is incompatible with negatives.store {store}; set it to none"
    if mined.candidates < mined.num:
        return (
            f"negatives.mined.candidates {mined.candidates} is less than negatives.mined.num {mined.num}, which are "
            "drawn from them; raise it"
        )
    if problem := _problem_of_pool("negatives.mined", mined):
        return problem
    if run.has_prediction_head:
        return (
            f"negatives.mined.num {mined.num} is incompatible with a prediction head, which queries pass and documents "
            "do not; set prediction_head.num_layers=0"
        )
    for stage in run.stages:
        if not LOSSES[stage.loss].explicit_negatives:
            able = losses_that(
                lambda each: each.explicit_negatives and each.is_for_pairs <= run.has_two_towers
            )
            return (
                f"loss {stage.loss} cannot use mined negatives; set negatives.mined.num=0, or loss to {able}"
            )
        if stage.logq_correction != "none":
            return (
                f"logq_correction {stage.logq_correction} assumes documents drawn by their frequency, and mined "
                "negatives are not; set it to none, or negatives.mined.num=0"
            )
    return None


def _check_rollback(run: "RunConfig") -> str | None:
    if run.monitor.on_collapse != "rollback" or any(stage.has_hinge for stage in run.stages):
        return None
    return (
        "monitor.on_collapse=rollback replaces the hinge by cross-entropy, and no stage has a "
        "hinge; set it to warn or stop"
    )


def _check_channels(run: "RunConfig") -> str | None:
    channels = run.data.channels
    for name, values in {"mean": run.augment.mean, "std": run.augment.std}.items():
        if values is not None and len(values) != channels:
            return f"augment.{name} has {len(values)} numbers for {channels} channels; give one per channel"
    return None
