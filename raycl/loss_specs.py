"""The registry of losses, with their requirements; imports no torch."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final


@final
@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The requirements and capabilities of a loss, against which configurations are checked.

    Attributes:
        objective: ``module:Class`` of the loss over all workers, a dataclass. Losses share the names of its fields.
        fixed: the values of fields that are not settings.
        keys: supported sources of keys: ``tower`` (another view, or the other half of a pair),
            ``momentum_encoder``, ``memory_bank`` (the sample's own slot of a memory bank).
        pairs: whether it supports the queries and keys of two towers.
        is_for_pairs: whether it is preferred for two towers.
        stored_negatives: whether it uses the rows of a queue or a memory bank.
        explicit_negatives: whether it uses negatives given with the queries.
        guided: whether it uses a guide: to mask the negatives that are nearer than the positive, or as a teacher.
        taught: whether it requires a guide, whose similarities it learns.
        needs_batch: whether the other rows of the batch must be negatives.
        partition: whether it requires the partition function of each sample, or of each side of a pair.
        labels: whether it requires labels.
        all_views: whether it compares all views of a sample at once, instead of pairs of them.
        row_weights: whether each row has a loss, which ``data.columns.weight`` weights.
        mixes: whether a hinge may be mixed into it.
        predicts: whether its queries may pass through a prediction head.
        neighbors: whether its positives are the nearest rows of a queue; it requires both the queue and a prediction
            head.
        learns: scalars that can be learned: ``temperature``, ``bias``.
        settings: the settings of the loss, by their names in the configuration.
    """

    objective: str
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    keys: tuple[str, ...] = ("tower",)
    pairs: bool = False
    is_for_pairs: bool = False
    stored_negatives: bool = False
    explicit_negatives: bool = False
    guided: bool = False
    taught: bool = False
    needs_batch: bool = False
    partition: bool = False
    labels: bool = False
    all_views: bool = False
    row_weights: bool = False
    mixes: bool = False
    predicts: bool = False
    neighbors: bool = False
    learns: tuple[str, ...] = ("temperature",)
    settings: tuple[str, ...] = ("temperature",)

    def fits(self, *, key: str, pairs: bool, store: str, in_batch: bool) -> bool:
        """Return whether the loss supports these sources of keys and negatives, and needs no teacher."""
        return (
            not self.taught
            and key in self.keys
            and (self.pairs or not pairs)
            and store in self.stores
            and (in_batch or not self.needs_batch)
        )

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores that the loss can use."""
        if self.partition:
            return ("partition",)
        if self.neighbors:
            return ("queue",)
        return ("none", "queue", "memory_bank") if self.stored_negatives else ("none",)

    @property
    def kind(self) -> Any:
        """The class of the objective."""
        module, name = self.objective.split(":")
        return getattr(importlib.import_module(module), name)

    def build(self, **settings: Any) -> Any:
        """Return the objective, which uses the settings that it has a field for; each is a field of some loss."""
        known = {each.name for spec in LOSSES.values() for each in fields(spec.kind)}
        assert settings.keys() <= known, f"no loss has the settings {settings.keys() - known}"
        names = {each.name for each in fields(self.kind)}
        used = {name: value for name, value in settings.items() if name in names}
        return self.kind(**used, **self.fixed)


MIN_TEMPERATURE = 0.01  # of a learned temperature, as CLIP clips its scale at 100
MIXED = "hinge"  # the loss that ``hinge_weight`` mixes into others
_ANY_KEY = ("tower", "momentum_encoder", "memory_bank")
LOSSES: dict[str, LossSpec] = {
    "nt_xent": LossSpec(
        objective="raycl.losses.nt_xent:NtXent", needs_batch=True, mixes=True, row_weights=True
    ),
    "info_nce": LossSpec(
        objective="raycl.losses.info_nce:InfoNce",
        keys=_ANY_KEY,
        pairs=True,
        stored_negatives=True,
        explicit_negatives=True,
        guided=True,
        mixes=True,
        predicts=True,
        row_weights=True,
        settings=("temperature", "proximal_weight"),
    ),
    "clip": LossSpec(
        objective="raycl.losses.clip:Clip",
        pairs=True,
        is_for_pairs=True,
        stored_negatives=True,
        explicit_negatives=True,
        guided=True,
        needs_batch=True,
        mixes=True,
        row_weights=True,
        settings=("temperature", "logq_correction"),
    ),
    "nce": LossSpec(
        objective="raycl.losses.nce:Nce",
        keys=("memory_bank",),
        stored_negatives=True,
        learns=(),
        settings=("temperature", "proximal_weight", "normalizer_momentum"),
    ),
    "hinge": LossSpec(
        objective="raycl.losses.hinge:Hinge",
        keys=_ANY_KEY,
        pairs=True,
        stored_negatives=True,
        explicit_negatives=True,
        learns=(),
        settings=("margin", "hardest_negative", "proximal_weight"),
    ),
    "siglip": LossSpec(
        objective="raycl.losses.siglip:SigLip",
        pairs=True,
        is_for_pairs=True,
        needs_batch=True,
        row_weights=True,
        learns=("temperature", "bias"),
        settings=("temperature", "bias"),
    ),
    "dcl": LossSpec(objective="raycl.losses.dcl:Dcl", needs_batch=True, row_weights=True),
    "dclw": LossSpec(
        objective="raycl.losses.dcl:Dcl",
        fixed={"sigma": 0.5},  # as in the paper
        needs_batch=True,
        row_weights=True,
    ),
    "gcl": LossSpec(
        objective="raycl.losses.gcl:Gcl", pairs=True, needs_batch=True, partition=True, row_weights=True
    ),
    "supcon": LossSpec(
        objective="raycl.losses.supcon:SupCon", needs_batch=True, labels=True, row_weights=True
    ),
    "poly_view": LossSpec(
        objective="raycl.losses.poly_view:PolyView",
        needs_batch=True,
        all_views=True,
        row_weights=True,
        settings=("temperature", "view_mean"),
    ),
    "distillation": LossSpec(
        objective="raycl.losses.distillation:Distillation",
        pairs=True,
        guided=True,
        taught=True,
        needs_batch=True,
        row_weights=True,
        settings=("temperature", "teacher_temperature", "teacher_keys"),
    ),
    "nnclr": LossSpec(
        objective="raycl.losses.nnclr:Nnclr",
        needs_batch=True,
        predicts=True,
        neighbors=True,
        row_weights=True,
    ),
}


def join_names(names: Iterable[str]) -> str:
    """Join names as ``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def losses_that(fit: Callable[[LossSpec], object]) -> str:
    """Join the names of the losses whose spec fits; empty if there are none."""
    names = [name for name, spec in LOSSES.items() if fit(spec)]
    return join_names(names) if names else ""


def cross_entropy_for(*, key: str, pairs: bool, store: str, in_batch: bool, mined: bool) -> str:
    """Return the cross-entropy that replaces the hinge after a collapse; ``mined`` negatives must stay in use."""
    fitting = [
        name
        for name, spec in LOSSES.items()
        if spec.mixes and spec.fits(key=key, pairs=pairs, store=store, in_batch=in_batch)
        if spec.explicit_negatives or not mined
    ]
    return min(fitting, key=lambda name: LOSSES[name].is_for_pairs != pairs)
