"""A stage: how long, how large its batches, which loss, how fast it learns."""

from typing import Annotated, Literal, Self, final

from pydantic import Field, field_validator, model_validator

from raycl.config.schema import Count, Fraction, NotNegative, Positive, Section
from raycl.loss_specs import LOSSES, MIXED, join_names


@final
class Stage(Section):
    """A stretch of the run; exactly one of ``epochs`` and ``steps`` says how long.

    A stage begins with a new epoch of the data; weights, optimizer and store carry on. ``workers``
    are those of the run unless the stage asks for others. ``chunk_size`` views of a worker are
    embedded with their graph at a time, so that the batch may be larger than memory; the result is
    the same (Gao et al., 2021). Each of ``cached_chunks`` saves a chunk's second pass for the memory of
    its graph; the first of them costs nothing. Where BatchNorm goes over the whole batch none is kept,
    and ``activation_checkpoint_every`` 1 takes less memory for one more forward pass.

    The peak learning rate is ``learning_rate`` at a batch of 256 rows and follows the batch by
    ``learning_rate_scaling``; after ``warmup_epochs`` (or a tenth of the stage, if that is less)
    it falls along half a cosine, or to a tenth at three and again at four fifths (``step``), of the
    stage or, with ``learning_rate_scope`` run, of the samples of the whole run.

    ``clip`` classifies each query among keys and each key among queries (Radford et al., 2021);
    ``logq_correction`` takes the logarithm of how common a key is in the data off its logits as a
    candidate, since a common one is drawn as a negative more often (Yi et al., 2019).
    ``siglip`` tells pairs from other combinations, each by itself, with a ``bias`` that is learned with the
    temperature (Zhai et al., 2023).
    ``hinge`` asks that the positive is nearer than the negatives by ``margin``: on the mean over the
    negatives, or for the ``hardest_negative`` only. A ``hinge_weight`` mixes it with a cross-entropy,
    as that fraction of the loss; it may move to ``final_hinge_weight`` in the course of the stage.
    ``proximal_weight`` pulls an embedding to its slot of the memory bank (Wu et al., 2018).
    """

    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Annotated[int, Field(ge=2)] = 256
    chunk_size: Count | None = None
    cached_chunks: Annotated[int, Field(ge=0)] = 1
    activation_checkpoint_every: Count | None = None
    workers: Count | None = None
    loss: str = "nt_xent"
    temperature: Positive = 0.1
    bias: float = -10.0
    logq_correction: bool = False
    margin: Positive = 0.2
    hardest_negative: bool = False
    hinge_weight: Fraction = 0.0
    final_hinge_weight: Fraction | None = None
    proximal_weight: NotNegative = 0.0
    learning_rate: Positive = 0.3
    learning_rate_scaling: Literal["linear", "square_root", "none"] = "linear"
    learning_rate_schedule: Literal["cosine", "step", "constant"] = "cosine"
    learning_rate_scope: Literal["stage", "run"] = "stage"
    warmup_epochs: NotNegative = 10.0

    @field_validator("loss")
    @classmethod
    def _is_a_loss(cls, name: str) -> str:
        if name not in LOSSES:
            raise ValueError(f"{name!r} is not a loss; choose {join_names(LOSSES)}")
        return name

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set exactly one of epochs and steps")
        return self

    @model_validator(mode="after")
    def _mixes_two_losses(self) -> Self:
        if self.mixes_hinge and not LOSSES[self.loss].mixes:
            mixing = [name for name, spec in LOSSES.items() if spec.mixes]
            raise ValueError(
                f"hinge_weight mixes the hinge with a cross-entropy, loss is {self.loss}: "
                f"set loss to {join_names(mixing)}, or leave hinge_weight out"
            )
        return self

    @property
    def mixes_hinge(self) -> bool:
        """Whether the hinge is a part of the loss at some step."""
        return bool(self.hinge_weight or self.final_hinge_weight)

    @property
    def has_hinge(self) -> bool:
        """Whether the hinge is the loss or a part of it."""
        return self.loss == MIXED or self.mixes_hinge

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate at this stage's batch size."""
        ratio = self.batch_size / 256
        return (
            self.learning_rate
            * {"linear": ratio, "square_root": ratio**0.5, "none": 1.0}[self.learning_rate_scaling]
        )
