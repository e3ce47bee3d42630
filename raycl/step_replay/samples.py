"""The samples of a step as a page shows them: ids, names, texts, and pictures of the views."""

import base64
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from raycl.data.in_memory import Batch, InMemoryDataset, pixels_of, texts_of, tokens_of
from raycl.data.texts import TokenLists, Tokens, ids_and_rows
from raycl.step_replay.rows import RunRows
from raycl.step_replay.softmax import Candidate, LossInputs
from raycl.training.views import Views

THUMBNAIL = 96  # pixels, the longer side


@final
@dataclass(frozen=True, kw_only=True)
class RenderedSample:
    """A view of a sample, or a stored row of it.

    Attributes:
        sample_id: its id; None for an explicit negative, and for a stored row that is of no row of the data.
        view: ``a`` and ``b`` of two views, ``query``, ``document`` and ``negative`` of pairs, ``image`` and ``caption``; None for
            stored rows.
        name: where the sample came from: a file, or a file and a row.
        label: its class, if it has one.
        text: the text of this view as the encoder sees it.
        picture: the image of this view as a data URL.
    """

    sample_id: int | None
    view: str | None = None
    name: str | None = None
    label: str | None = None
    text: str | None = None
    picture: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are known, without the picture."""
        return {
            name: value for name, value in asdict(self).items() if value is not None and name != "picture"
        }


@final
class StepSamples:
    """The samples behind the candidates of a step: all of its batch, and those in ``shown``."""

    def __init__(self, rows: RunRows, views: Views, inputs: LossInputs, shown: Iterable[Candidate]) -> None:
        self._rows, self._views, self._inputs = rows, views, inputs
        self._config = rows.run.config
        self._kind, self._role = self._config.data.kind, self._config.key_text_role
        self._known: dict[Candidate, RenderedSample] = {}
        self._source = rows.sources[views.data_set]
        stored = [self._stored_name(each) for each in shown if each.place == "stored"]
        ids = np.array([*views.ids.tolist(), *stored], np.int64)
        self._data_set: InMemoryDataset
        self._data_set, self._where = rows.select(ids, data_set=views.data_set)

    def of(self, candidate: Candidate) -> RenderedSample:
        """Return the sample of a candidate."""
        if candidate not in self._known:
            self._known[candidate] = self._of(candidate)
        return self._known[candidate]

    def age(self, candidate: Candidate, *, step: int) -> int | None:
        """Return the age of a stored row in steps, None for other rows and for rows that were never written."""
        steps = self._inputs.stored.negative_step
        if candidate.place != "stored" or steps is None or steps[candidate.row] < 0:
            return None
        return step - int(steps[candidate.row])

    def _of(self, candidate: Candidate) -> RenderedSample:
        if candidate.place == "batch":
            return self._of_batch(candidate.row, candidate.view)
        if candidate.place == "explicit":
            assert self._views.negatives is not None, "the batch has explicit negatives"
            return RenderedSample(
                sample_id=None, view="negative", text=self._text(self._views.negatives[candidate.row])
            )
        return self._of_stored(self._stored_name(candidate))

    def _stored_name(self, candidate: Candidate) -> int:
        name = self._inputs.stored.negative_name
        assert name is not None, "stored rows have names"
        return int(name[len(name) - self._num_stored + candidate.row])

    @property
    def _num_stored(self) -> int:
        steps = self._inputs.stored.negative_step
        return 0 if steps is None else len(steps)

    def _of_batch(self, row: int, view: int) -> RenderedSample:
        sample_id = int(self._views.ids[row])
        rows = self._views.view_a if view == 0 else self._views.second_view()
        if rows is None:  # the key is a slot of a bank
            return self._of_data(sample_id)
        is_text = rows.ndim == 2
        views = {"pairs": ("query", "document"), "image_text": ("image", "caption")}.get(
            self._kind, ("a", "b")
        )
        return RenderedSample(
            sample_id=sample_id,
            view=views[view],
            name=self._where.get(sample_id),
            label=self._label(sample_id),
            text=self._text(rows[row]) if is_text else None,
            picture=None if is_text else self._picture(rows[row]),
        )

    def _of_stored(self, name: int) -> RenderedSample:
        """Return the sample that a stored row is of; a queue names the rows of texts by their text."""
        if not self._config.has_text_ids:
            return self._of_data(name)
        position = self._by_text.get(name)
        if position is None:
            return RenderedSample(sample_id=None)
        return self._of_data(int(self._data_set.sample_id[position]), text_id=name)

    def _of_data(self, sample_id: int, *, text_id: int | None = None) -> RenderedSample:
        """Return a sample as it is in the data."""
        where, place = self._where.get(sample_id), self._place(sample_id)
        if place is None:
            return RenderedSample(sample_id=sample_id, name=where)
        known, batch = (
            {"name": where, "label": self._label(sample_id)},
            self._data_set.take(np.array([place])),
        )
        if "image" in batch.contents and text_id is None:
            return RenderedSample(sample_id=sample_id, **known, picture=data_url(pixels_of(batch).images[0]))
        return RenderedSample(
            sample_id=sample_id, **known, text=self._decode(_tokens(batch, self._role, text_id))
        )

    def _place(self, sample_id: int) -> int | None:
        """Return the position of a sample in the data set, None for an unknown one."""
        ids = self._data_set.sample_id
        place = int(np.searchsorted(ids, sample_id))
        return place if place < len(ids) and ids[place] == sample_id else None

    def _label(self, sample_id: int) -> str | None:
        place = self._place(sample_id)
        label = -1 if place is None else int(self._data_set.label[place])
        return None if label < 0 else self._source.label_name(label)

    @cached_property
    def _by_text(self) -> dict[int, int]:
        """The position of a row with each text, by text id."""
        found: dict[int, int] = {}
        start = 0
        for batch in self._data_set.batches(4_096):
            texts = batch.contents[self._role]
            assert isinstance(texts, Tokens | TokenLists), "keys are texts"
            text_ids, rows = ids_and_rows(texts)
            found |= zip(text_ids.tolist(), (start + rows).tolist(), strict=True)
            start += len(batch)
        return found

    def _text(self, tokens: Tensor) -> str:
        return self._decode(tokens[tokens != 0].cpu().numpy().astype(np.int32))

    def _decode(self, tokens: NDArray[np.int32]) -> str:
        tokenizer = self._rows.job.tokenizer
        assert tokenizer is not None, "texts have a tokenizer"
        return tokenizer.decode([tokens])[0]

    def _picture(self, view: Tensor) -> str:
        """Return a view [channels, height, width] before its normalization."""
        mean, std = (view.new_tensor(each)[:, None, None] for each in self._config.normalization)
        pixels = ((view * std + mean).clamp(0, 1) * 255).round().byte()
        return data_url(pixels.permute(1, 2, 0).cpu().numpy())


def data_url(pixels: NDArray[np.uint8]) -> str:
    """Return an image [height, width, channels] as a small PNG in a data URL."""
    picture = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _tokens(batch: Batch, role: str, text_id: int | None) -> NDArray[np.int32]:
    """Return the tokens of the only row of a batch: of the text with this id, or of the first text."""
    if role == "document":
        return tokens_of(batch, role).values
    texts = texts_of(batch, role)
    matches = np.flatnonzero(texts.tokens.text_id == text_id)
    return texts.tokens.take(matches[:1] if len(matches) else np.zeros(1, np.int64)).values
