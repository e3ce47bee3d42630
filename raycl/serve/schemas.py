"""What the explorer answers, as JSON."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Queries = Literal["id", "image", "text"]

# As text, since JavaScript counts exactly to 2**53 only.
SampleId = Annotated[str, Field(description="Id of a sample, a whole number of 64 bits.", examples=["4711"])]
Age = Annotated[int, Field(description="The newest step that wrote to the bank, minus the row's own.")]


class Shard(BaseModel):
    """An actor that holds a part of the bank."""

    node_ip: str
    rows: int
    num_bytes: int
    restarts: int


class AgeBin(BaseModel):
    """Rows that are younger than ``below`` steps, but not than the bin before."""

    below: int
    rows: int


class Stats(BaseModel):
    """A bank in numbers, at most a second old. Ages and norms are null while no row is written."""

    name: str
    kind: Literal["queue", "memory_bank"]
    run: str
    rows: Annotated[int, Field(description="Rows that the bank may hold.")]
    filled: Annotated[int, Field(description="Rows that were written.")]
    dim: int
    dtype: str
    num_bytes: int
    shards: list[Shard]
    newest_step: int | None
    age_mean: float | None
    age_max: int | None
    age_histogram: list[AgeBin]
    norm_mean: float | None
    norm_min: float | None
    norm_max: float | None
    puts: Annotated[int, Field(description="Rows written by workers since the shards started.")]
    reads: int
    puts_per_second: Annotated[float, Field(description="Of the last 10 s.")]
    reads_per_second: float
    restarts: int
    questions: Annotated[int, Field(description="Questions for neighbors and rows that were answered here.")]
    queries: Annotated[list[Queries], Field(description="What one may ask with.")]
    shows_samples: Annotated[bool, Field(description="Whether samples can be shown by their id.")]


class Neighbor(BaseModel):
    """A row near to the query. Its norm is null if it was replaced meanwhile."""

    sample_id: SampleId
    similarity: Annotated[float, Field(description="Cosine, exact.")]
    step: int
    age: Age
    norm: float | None


class Neighbors(BaseModel):
    """The rows of the highest cosine, nearest first; the checkpoint that encoded a picture or a text."""

    neighbors: list[Neighbor]
    checkpoint: str | None = None


class Row(BaseModel):
    """A row of a sample; step and age are null for a slot that no step has written yet."""

    step: int | None
    age: Age | None
    norm: float


class Rows(BaseModel):
    """The rows of a sample that are in the bank now, newest first."""

    sample_id: SampleId
    rows: list[Row]


class Text(BaseModel):
    """A text of a sample, and what it is there."""

    role: str
    text: str


class Sample(BaseModel):
    """A sample as a person sees it."""

    sample_id: SampleId
    image: Annotated[str | None, Field(description="A thumbnail, as a data: URL.")] = None
    texts: list[Text] = []
    label: str | None = None


class TextQuery(BaseModel):
    """A text to ask with."""

    text: Annotated[str, Field(max_length=20_000)]


class ErrorResponse(BaseModel):
    """What is wrong, what came, and what to do: one line."""

    detail: str
