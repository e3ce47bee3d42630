"""JSON schemas of the explorer's API."""

from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, Field, create_model

from raycl.negatives.stats import BankStats

QueryKind = Literal["id", "image", "text"]

# A string, since JavaScript numbers are exact up to 2**53 only.
SampleId = Annotated[str, Field(description="Id of a sample, a 64-bit integer.", examples=["4711"])]
Age = Annotated[int, Field(description="The newest step that wrote to the bank, minus the row's own.")]
NewestStep = Annotated[
    int | None, Field(description="The newest step that wrote to the bank; null if none did.")
]


class Shard(BaseModel):
    """An actor that holds a part of the bank."""

    node_ip: str
    rows: int
    num_bytes: int
    restarts: int


class AgeBin(BaseModel):
    """Rows younger than ``below`` steps, but not younger than the bin before."""

    below: int
    rows: int


_CHANGED = {"output", "shards", "age_histogram"}  # have another form in JSON
_BANK_FIELDS: dict[str, Any] = {
    name: (hint, ...) for name, hint in get_type_hints(BankStats).items() if name not in _CHANGED
}
_BankStats: Any = create_model("_BankStats", **_BANK_FIELDS)


class Stats(_BankStats):
    """Statistics of a bank, at most a second old. Ages and norms are null while no row is written."""

    run: str
    shards: list[Shard]
    age_histogram: list[AgeBin]
    questions: Annotated[int, Field(description="Queries for neighbors and rows that were answered here.")]
    queries: Annotated[list[QueryKind], Field(description="Kinds of queries that the run's encoder accepts.")]
    shows_samples: Annotated[bool, Field(description="Whether samples can be shown by their id.")]


class Neighbor(BaseModel):
    """A row near the query. Its norm is null if the row was replaced in between."""

    sample_id: SampleId
    similarity: Annotated[float, Field(description="Cosine, exact.")]
    step: int
    age: Age
    norm: float | None


class Neighbors(BaseModel):
    """The rows of highest cosine, nearest first; and the checkpoint that encoded an image or a text."""

    newest_step: NewestStep
    neighbors: list[Neighbor]
    checkpoint: str | None = None


class SampleIds(BaseModel):
    """The ids of random samples of the bank, each once."""

    sample_ids: list[SampleId]


class Curve(BaseModel):
    """A metric of the run: the steps at which it was logged, thinned out if there are many, and its values."""

    name: str
    steps: list[int]
    values: list[float]


class Progress(BaseModel):
    """The loss of the run, and its kNN accuracy or recall, where logged."""

    curves: list[Curve]


class Row(BaseModel):
    """A row of a sample; step and age are null for a slot that no step has written yet.

    The norm is null as well if the slot is of a partition function.
    """

    step: int | None
    age: Age | None
    norm: float | None


class Rows(BaseModel):
    """The current rows of a sample, newest first."""

    sample_id: SampleId
    newest_step: NewestStep
    rows: list[Row]


class Text(BaseModel):
    """A text of a sample, and its column."""

    role: str
    text: str


class Sample(BaseModel):
    """A sample as a person sees it."""

    sample_id: SampleId
    image: Annotated[str | None, Field(description="A thumbnail, as a data: URL.")] = None
    texts: list[Text] = []
    label: str | None = None


class TextQuery(BaseModel):
    """A text as a query."""

    text: Annotated[str, Field(max_length=20_000)]


class ErrorResponse(BaseModel):
    """The problem, the value and the remedy in one line."""

    detail: str
