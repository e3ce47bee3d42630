"""Texts from the source to the batch: cut, stored and padded."""

import numpy as np
import pyarrow as pa
import pytest

from raycl.data.codecs import store_all
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.texts import TextFormat, Tokens
from raycl.tokenization.tokenizer import BrokenTextError, Tokenizer, train_tokenizer

TEXTS = ["a boat on the sea", "two boats", "the sea is calm today and the boat is on it", "calm"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS * 3, vocabulary_size=280)


def rows_of(tokenizer: Tokenizer, max_length: int = 6) -> InMemoryDataset:
    text_format = TextFormat(tokenizer=tokenizer, max_length=max_length)
    formats = {"text": text_format}
    stored = store_all(formats, {"text": text_format.decode_all(TEXTS)})
    numbers = pa.array(range(len(TEXTS)), pa.int64())
    table = pa.table(stored | {"sample_id": numbers, "label": numbers})
    # Several tables, sliced and empty, as Ray may hand them over.
    return InMemoryDataset([table.slice(0, 1), table.slice(1, 0), table.slice(1)], formats)


def tokens_of(batch: Batch) -> Tokens:
    tokens = batch.contents["text"]
    assert isinstance(tokens, Tokens)
    return tokens


def test_texts_are_read_by_position_cut_and_padded_to_the_longest(tokenizer: Tokenizer) -> None:
    batch = tokens_of(rows_of(tokenizer).take(np.array([2, 0, 3])))
    expected = tokenizer.encode([TEXTS[2], TEXTS[0], TEXTS[3]], max_length=6)
    assert batch.lengths.tolist() == [len(row) for row in expected]
    assert batch.padded().shape == (3, 6)
    for padded, row in zip(batch.padded(), expected, strict=True):
        assert padded.tolist() == [*row, *[0] * (6 - len(row))]


def test_batches_are_joined_row_after_row(tokenizer: Tokenizer) -> None:
    rows = rows_of(tokenizer)
    joined = rows.take(np.array([3])).joined(rows.take(np.array([0, 1])))
    whole = rows.take(np.array([3, 0, 1]))
    assert joined.sample_id.tolist() == [3, 0, 1]
    assert np.array_equal(tokens_of(joined).padded(), tokens_of(whole).padded())


def test_a_broken_text_is_told_apart_and_the_others_keep_their_places(tokenizer: Tokenizer) -> None:
    text_format = TextFormat(tokenizer=tokenizer, max_length=6)
    decoded = text_format.decode_all([TEXTS[0], None, "", b"\xff\xfe", 3, TEXTS[3].encode()])
    causes = [str(value) if isinstance(value, BrokenTextError) else None for value in decoded]
    assert causes == [None, "missing value", "empty text", "invalid UTF-8", "int in place of a text", None]
    assert np.array_equal(decoded[0], tokenizer.encode([TEXTS[0]], 6)[0])
    assert np.array_equal(decoded[5], tokenizer.encode([TEXTS[3]], 6)[0])


def test_no_texts_make_empty_columns_of_the_same_type(tokenizer: Tokenizer) -> None:
    text_format = TextFormat(tokenizer=tokenizer, max_length=6)
    nothing, something = text_format.store([]), text_format.store(text_format.decode_all(TEXTS))
    assert {name: each.type for name, each in nothing.items()} == {
        name: each.type for name, each in something.items()
    }
    assert len(nothing["tokens"]) == 0
