"""The settings of a stage."""

from typing import Annotated, Literal, Self, final

from pydantic import Field, field_validator, model_validator

from raycl.config.schema import Count, Finite, Fraction, NotNegative, Positive, Section
from raycl.loss_specs import LOSSES, MIXED, join_names


@final
class Stage(Section):
    """A part of the run with its own batch size, loss and learning rate.

    Exactly one of ``epochs`` and ``steps`` is set. A stage starts with an epoch of the data; weights,
    optimizer and store carry over from the previous stage.

    The peak learning rate is ``learning_rate`` at a batch of 256 rows and scales with the batch by
    ``learning_rate_scaling``. After the warmup it falls along half a cosine, along a line, or to a tenth at three
    fifths and again at four fifths (``step``).
    """

    epochs: Count | None = None
    """Length in passes over the data."""

    steps: Count | None = None
    """Length in optimization steps."""

    batch_size: Annotated[int, Field(ge=2)] = 256
    """Rows per step over all workers, at least 2; a multiple of the number of workers."""

    image_size: Annotated[int, Field(ge=8, le=1024)] | None = None
    """Side of a view in pixels, at most ``data.image_size``, its default and the size of the evaluation and of
    the saved encoder (Touvron et al., 2019; Tan and Le, 2021).
    """

    chunk_size: Count | None = None
    """Views per worker embedded with their graph at a time, so that a batch may exceed memory; the result
    is the same (Gao et al., 2021). Default: all.
    """

    cached_chunks: Annotated[int, Field(ge=0)] = 1
    """Chunks whose graph is kept from the first pass; each saves a forward pass and costs the memory of a
    graph, except the first, which is free. No effect where BatchNorm spans the whole batch.
    """

    activation_checkpoint_every: Count | None = None
    """k keeps the activations at every k-th residual block and recomputes those between: less memory, one
    more forward pass (Chen et al., 2016). Default: keep all.
    """

    workers: Count | None = None
    """Workers of this stage; default: the run's."""

    loss: str = "nt_xent"
    """``nt_xent``, ``dcl`` or ``dclw`` (Yeh et al., 2022), ``gcl``, whose negatives are the whole data set (Yuan
    et al., 2022; of pairs: Wei et al., 2024), ``info_nce``, ``nce`` (Wu et al., 2018), ``hinge``,
    ``siglip`` (Zhai et al., 2023), ``supcon``, whose positives are all samples of a class (Khosla et al., 2020),
    ``poly_view``, of all views of a sample at once (Shidani et al., 2024), ``nnclr``, whose positives are the nearest
    rows of a queue (Dwibedi et al., 2021), ``distillation``, which learns the similarities of a teacher
    (``negatives.guide``; Fang et al., 2021),
    or ``clip``, which classifies queries among keys and keys among queries (Radford et al., 2021).
    """

    temperature: Positive = 0.1
    """Divisor of the cosines in a cross-entropy; 0.1 as in SimCLR."""

    bias: Finite = -10.0
    """Bias of ``siglip``, with the paper's initial value; learned with ``learn_temperature``."""

    logq_correction: Literal["none", "simple", "refined"] = "none"
    """How ``clip`` corrects for frequent documents, which are drawn as negatives more often: ``simple``
    subtracts the log frequency of a document from its logits (Yi et al., 2019); ``refined`` leaves the positive,
    which is not drawn, uncorrected, and weights a query by 1 - p(positive) (Khrylchenko et al., 2025).
    """

    view_mean: Literal["geometric", "arithmetic"] = "geometric"
    """Mean of ``poly_view`` over the probabilities of the other views of a sample; ``arithmetic`` tolerates a view that
    is far from the others.
    """

    teacher_temperature: Positive = 0.1
    """Divisor of the teacher's cosines in ``distillation``; a low one leaves the nearest samples only."""

    teacher_keys: bool = False
    """Whether ``distillation`` compares the student with the teacher's embeddings in place of its own; both then need
    the same width, ``projection_head.dim``.
    """

    margin: Positive = 0.2
    """Margin of the hinge, in cosine; 0.2 as in VSE++ (Faghri et al., 2018)."""

    hardest_negative: bool = False
    """Whether the hinge uses only the hardest negative; by default the mean over the negatives."""

    hinge_weight: Fraction = 0.0
    """Fraction of the hinge in a loss that mixes it with a cross-entropy, 0 to 1."""

    final_hinge_weight: Fraction | None = None
    """Hinge weight at the end of the stage, reached linearly; default: constant."""

    proximal_weight: NotNegative = 0.0
    """Weight of the pull of an embedding toward its slot of the memory bank (Wu et al., 2018)."""

    matryoshka_dims: tuple[Count, ...] | None = None
    """Lengths of prefixes of the embedding to train as embeddings: the loss is the sum over the normalized
    prefixes (Kusupati et al., 2022). Include the full length to train it too. Default: only the full length.
    """

    matryoshka_weights: tuple[Positive, ...] | None = None
    """Weight of each prefix in the loss; default: 1."""

    learning_rate: Positive = 0.3
    """Peak learning rate at a batch of 256 rows; 0.3 as in SimCLR with LARS."""

    learning_rate_scaling: Literal["linear", "square_root", "none"] = "linear"
    """``linear`` scales the learning rate with the batch size, ``square_root`` with its square root."""

    learning_rate_schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """After the warmup, ``cosine`` and ``linear`` fall to 0 and ``step`` to a tenth, twice; ``constant`` stays."""

    learning_rate_scope: Literal["stage", "run"] = "stage"
    """Whether the schedule spans this stage or the samples of the whole run."""

    warmup_epochs: NotNegative = 10.0
    """Epochs of linear warmup, at most a tenth of the stage."""

    @field_validator("logq_correction", mode="before")
    @classmethod
    def _is_a_correction(cls, value: object) -> object:
        """Accept the values of older versions."""
        return {True: "simple", False: "none"}[value] if isinstance(value, bool) else value

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
    def _has_a_weight_per_prefix(self) -> Self:
        dims, weights = self.matryoshka_dims, self.matryoshka_weights
        if dims is not None and (not dims or len(set(dims)) < len(dims)):
            raise ValueError(f"matryoshka_dims must be different lengths, got {list(dims)}")
        if dims is not None and weights is not None and len(dims) != len(weights):
            raise ValueError(
                f"matryoshka_weights has {len(weights)} numbers for {len(dims)} matryoshka_dims; give one per length"
            )
        return self

    @property
    def has_hinge(self) -> bool:
        """Whether the hinge is the loss or, at some step, a part of it."""
        return self.loss == MIXED or bool(self.hinge_weight or self.final_hinge_weight)

    @property
    def is_hinge(self) -> bool:
        """Whether the loss is the hinge alone at all steps."""
        weights = {self.hinge_weight, self.final_hinge_weight} - {None}
        return self.loss == MIXED or (LOSSES[self.loss].mixes and weights == {1.0})

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate at this stage's batch size."""
        ratio = self.batch_size / 256
        factors = {"linear": ratio, "square_root": ratio**0.5, "none": 1.0}
        return self.learning_rate * factors[self.learning_rate_scaling]
