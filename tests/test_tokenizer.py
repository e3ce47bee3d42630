"""Tokenizers: training, lossless encoding, files of other tools, and invalid texts."""

import json
import pickle
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfTransformer
from tokenizers import Tokenizer as TheirTokenizer
from tokenizers import models, pre_tokenizers, processors

from raycl.errors import ConfigError, DataError
from raycl.tokenization import (
    InvalidTextError,
    Tokenizer,
    Vocabulary,
    inverse_document_frequency,
    read_text,
    train_tokenizer,
)
from tests.texts import invented_texts, with_cls

TEXTS = invented_texts()

# The character that byte-level splitting uses for each byte; printable Latin-1 characters stay as they are.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}
SPACES = re.compile(r"[\s\x1c-\x1f]")  # some of which only Python treats as spaces


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TEXTS), vocabulary_size=1_000, lowercase=False)


@cache
def names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the name of each token, read from the file."""
    return {number: name for name, number in json.loads(tokenizer.to_json())["model"]["vocab"].items()}


def spelled(tokenizer: Tokenizer, row: np.ndarray) -> str:
    """Join the bytes of a row's tokens, without the spaces before words."""
    written = "".join(names(tokenizer)[number] for number in row.tolist()).replace("Ġ", "")
    return bytes(BYTE_OF[character] for character in written).decode()


# Training


def test_the_same_texts_give_the_same_file_in_every_process() -> None:
    code = (
        "import hashlib\nfrom raycl.tokenization import train_tokenizer\n"
        "from tests.texts import invented_texts\n"
        "text = train_tokenizer(invented_texts(), vocabulary_size=1_000).to_json()\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    came = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent.parent,
            env={"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, parallel in (("1", "false"), ("2", "true"))
    ]
    assert came[0] == came[1] != ""


def test_a_vocabulary_has_special_tokens_first_all_bytes_and_common_words(tokenizer: Tokenizer) -> None:
    vocabulary = names(tokenizer)
    assert [vocabulary[number] for number in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.special_tokens == (0, 1, 2, 3, 4)
    assert tokenizer.num_tokens == len(vocabulary) == 1_000
    assert set(BYTE_OF) <= set(vocabulary.values())
    text = " ".join(TEXTS)
    assert len(tokenizer.encode([text], len(text))[0]) < len(text) / 3


@pytest.mark.parametrize("lowercase", [True, False])
def test_lowercase_ignores_the_case_of_letters(lowercase: bool) -> None:
    tokenizer = train_tokenizer(TEXTS, vocabulary_size=300, lowercase=lowercase)
    upper, lower = tokenizer.encode(["BADA Dafi", "bada dafi"], 32)
    assert np.array_equal(upper, lower) == lowercase


def test_invalid_training_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary_size 260.*at least 261"):
        train_tokenizer(iter(TEXTS), vocabulary_size=260)
    with pytest.raises(DataError, match="no texts"):
        train_tokenizer(iter([]))


RUN = "badafi" * 500  # without spaces
LONG = (" ".join(TEXTS) * 3)[:100_000]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (LONG + " q" * 9_000, LONG),
        (RUN, " ".join(RUN[start : start + 64] for start in range(0, len(RUN), 64))),
    ],
    ids=["long text", "run without spaces"],
)
def test_training_reads_the_beginning_of_a_text_and_splits_long_runs(text: str, read: str) -> None:
    whole, cut = (train_tokenizer([each], vocabulary_size=400) for each in (text, read))
    assert whole.to_json() == cut.to_json()
    assert max(map(len, names(whole).values())) <= 16


# Texts to tokens

CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"))


@given(text=st.text(CHARACTERS, max_size=300))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_tokens_of_any_text_spell_it(tokenizer: Tokenizer, text: str) -> None:
    (row,) = tokenizer.encode([text], 10_000)
    normal = SPACES.sub("", unicodedata.normalize("NFKC", text))
    assert SPACES.sub("", spelled(tokenizer, row) if row.tolist() != [1] else "") == normal
    assert len(row)
    assert row.dtype == np.int32
    assert row.min() > 0


def test_the_tokens_of_long_words_spell_them(tokenizer: Tokenizer) -> None:
    for text in ("\u4f60\u597d\u4e16\u754c" * 30, "x" * 500, "\U0001f600" * 100, "a\u0301\u0323" * 90):
        (row,) = tokenizer.encode([text], 10_000)
        assert spelled(tokenizer, row) == unicodedata.normalize("NFKC", text)


def test_the_tokens_of_a_text_do_not_depend_on_other_texts(tokenizer: Tokenizer) -> None:
    together = tokenizer.encode(TEXTS[:100], 24)
    for text, row in zip(TEXTS[:100], together, strict=True):
        assert np.array_equal(row, tokenizer.encode([text], 24)[0])


def test_all_cores_encode_as_one(tokenizer: Tokenizer) -> None:
    texts = [*TEXTS[:100], "", " " * 10_000 + "late", "word " * 400, "[SEP] \u4f60\u597d"]
    for row, other in zip(
        tokenizer.encode(texts, 24), tokenizer.encode(texts, 24, all_cores=True), strict=True
    ):
        assert np.array_equal(row, other)


def test_a_vocabulary_counts_the_tokens_of_all_its_texts(tokenizer: Tokenizer) -> None:
    texts = TEXTS[:100] * 25  # more than are counted at a time
    came = Vocabulary.of_texts(texts, tokenizer, max_length=24, size=0, lowercase=True).weights
    assert came is not None
    rows = tokenizer.encode(texts, 24)
    np.testing.assert_array_equal(came, inverse_document_frequency(rows, tokenizer.num_tokens))


@pytest.mark.parametrize("max_length", [1, 7, 40])
def test_a_truncated_row_is_a_prefix_of_the_full_row(tokenizer: Tokenizer, max_length: int) -> None:
    # The longest tokens give the most characters per token.
    longest = sorted((name for name in names(tokenizer).values() if name[0] == "Ġ"), key=len)[-1]
    assert len(longest) > 14
    texts = [" ".join(TEXTS), " ".join([longest[1:]] * 200), " ".join(["\u4f60" * 60, *TEXTS[:50]])]
    for text in texts:
        whole, cut = (tokenizer.encode([text], most)[0] for most in (100_000, max_length))
        assert len(cut) == max_length
        assert np.array_equal(cut, whole[:max_length])


@pytest.mark.parametrize("text", ["x" * 10**6, "ba " * 350_000, "\u4f60" * 10**6, " " * 10**6 + "ba"])
def test_a_text_of_a_megabyte_takes_no_longer_than_its_beginning(tokenizer: Tokenizer, text: str) -> None:
    started = time.perf_counter()
    (row,) = tokenizer.encode([text], 128)
    assert time.perf_counter() - started < 0.5
    beginning = text.lstrip()[:3_000]
    assert np.array_equal(row, tokenizer.encode([beginning], 128)[0])


def test_names_of_special_tokens_are_read_as_plain_text(tokenizer: Tokenizer) -> None:
    for text in ("[PAD]", "[CLS] ba [SEP]", "[UNK]", "[MASK][PAD]"):
        (row,) = tokenizer.encode([text], 64)
        assert not set(row.tolist()) & set(tokenizer.special_tokens)
        assert spelled(tokenizer, row) == text.replace(" ", "")


def test_an_empty_text_becomes_one_unknown_token(tokenizer: Tokenizer) -> None:
    assert [row.tolist() for row in tokenizer.encode(["", " \n "], 8)] == [[1], [1]]


def test_a_tokenizer_with_cls_begins_each_text_with_it() -> None:
    plain = train_tokenizer(TEXTS, vocabulary_size=500)
    beginning = with_cls(plain)
    for without, row in zip(plain.encode(TEXTS[:50], 15), beginning.encode(TEXTS[:50], 16), strict=True):
        assert row.tolist() == [2, *without.tolist()]
    with pytest.raises(ConfigError, match="no room for a text, came 1"):
        beginning.encode(["ba"], 1)


# Words


def test_exactly_one_token_per_word_begins_a_word(tokenizer: Tokenizer) -> None:
    text = "Bada bafi-dani, 4000mah (dsc-w120)!!! ba_fi " + " ".join(TEXTS[:40])
    (row,) = tokenizer.encode([text], 10_000)
    assert tokenizer.begins_word.shape == (tokenizer.num_tokens,)
    assert tokenizer.begins_word[row].sum() == len(re.findall(r"\w+|[^\w\s]+", text))
    assert tokenizer.begins_word[row[0]]


def test_each_token_that_begins_a_chinese_character_begins_a_word() -> None:
    tokenizer = train_tokenizer(["\u4f60\u597d\u4e16\u754c"] * 9 + TEXTS, vocabulary_size=600)
    (row,) = tokenizer.encode(["\u4e16\u754c\u4f60"], 64)
    assert 1 < tokenizer.begins_word[row].sum() <= 4


# Files


def test_a_tokenizer_is_restored_from_its_file_and_from_a_pickle(tokenizer: Tokenizer) -> None:
    for again in (Tokenizer(tokenizer.to_json()), pickle.loads(pickle.dumps(tokenizer))):
        assert again.to_json() == tokenizer.to_json()
        assert again.fingerprint == tokenizer.fingerprint
        for text in (*TEXTS[:20], "[PAD] [CLS]", ""):
            assert np.array_equal(again.encode([text], 64)[0], tokenizer.encode([text], 64)[0])


def test_fingerprints_distinguish_tokenizers_but_not_the_layout_of_the_file() -> None:
    made = [
        train_tokenizer(TEXTS, vocabulary_size=400),
        train_tokenizer(TEXTS, vocabulary_size=401),
        with_cls(train_tokenizer(TEXTS, vocabulary_size=400)),
        train_tokenizer(TEXTS, vocabulary_size=400, lowercase=False),
        train_tokenizer(TEXTS[::2], vocabulary_size=400),
    ]
    assert len({each.fingerprint for each in made}) == len(made)
    turned_round = dict(reversed(json.loads(made[0].to_json()).items()))
    written_otherwise = json.dumps(turned_round, indent=2, ensure_ascii=True)
    assert Tokenizer(written_otherwise).fingerprint == made[0].fingerprint
    assert re.fullmatch("[0-9a-f]{16}", made[0].fingerprint)


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_file_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        ConfigError, match="the tokenizer is damaged: .*; give the content of a tokenizer.json"
    ):
        Tokenizer(text)


def like_roberta() -> TheirTokenizer:
    """Build a foreign tokenizer with padding id 1 and a closing token."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = ["Ġ", "b", "a", "d", "f", "i", "Ġb", "Ġba"]
    theirs = TheirTokenizer(
        models.BPE(
            {name: number for number, name in enumerate([*special, *words])},
            [("Ġ", "b"), ("Ġb", "a")],
            unk_token="<unk>",
        )
    )
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    theirs.add_special_tokens(special)
    return theirs


def test_a_tokenizer_of_another_tool_keeps_its_tokens_except_for_padding() -> None:
    theirs = like_roberta()
    ours = Tokenizer(theirs.to_str())
    assert ours.special_tokens == (0, 1, 2, 3)
    for max_length in (3, 5, 50):
        theirs.enable_truncation(max_length)
        for text in ("bada", "ba da fi ba", "zz", "ba " * 40):
            expected = [{0: 1, 1: 0}.get(number, number) for number in theirs.encode(text).ids]
            assert ours.encode([text], max_length)[0].tolist() == expected
    begins = {name: bool(ours.begins_word[n]) for name, n in theirs.get_vocab().items() if n > 3}
    assert {name for name, is_begin in begins.items() if is_begin} == {"Ġ", "Ġb", "Ġba"}
    spelled = {name: ours.spellings[n] for name, n in theirs.get_vocab().items() if n > 3}
    assert {name: spelling for name, spelling in spelled.items() if spelling != name} == {
        "Ġ": " ",
        "Ġb": " b",
        "Ġba": " ba",
    }
    assert ours.spellings[:4] == [""] * 4


def test_special_tokens_stay_around_the_texts_of_another_script() -> None:
    """A tokenizer without a token for unknown characters drops them, such as all of the Latin script."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "س": 4, "ل": 5, "م": 6}
    theirs = TheirTokenizer(models.BPE(vocabulary, []))
    theirs.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    theirs.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    (row,) = Tokenizer(theirs.to_str()).encode(["سلم"], 9)
    assert row.tolist() == theirs.encode("سلم").ids == [2, 4, 5, 6, 3]


def test_word_continuations_are_recognized_in_berts_tokenizers() -> None:
    vocabulary = {"[PAD]": 0, "ba": 1, "##da": 2, "##fi": 3, "[UNK]": 4, "[CLS]": 5, "[SEP]": 6, "<0x41>": 7}
    theirs = TheirTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ours = Tokenizer(theirs.to_str())
    (row,) = ours.encode(["badafi ba"], 9)
    assert row.tolist() == [1, 2, 3, 1]
    assert ours.begins_word[row].tolist() == [True, False, False, True]
    assert ours.spellings == ["", " ba", "da", "fi", "", "", "", ""]


@pytest.mark.parametrize("length", [101, 150, 400])
def test_a_text_of_words_that_are_too_long_keeps_its_end(length: int) -> None:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "ba": 2, "##ba": 3}
    theirs = TheirTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ours = Tokenizer(theirs.to_str())
    word = "ba" * (length // 2 + 1)
    text = " ".join([word] * 60 + ["ba"] * 100)
    for max_length in (3, 20, 64, 100, 200):
        rows = ours.encode([text, "ba"], max_length)
        assert rows[0].tolist() == theirs.encode(text).ids[:max_length]
        assert rows[1].tolist() == [2]


def test_the_token_with_id_0_is_exchanged_with_the_padding() -> None:
    vocabulary = {"Ġba": 0, "da": 1, "<unk>": 2, "<pad>": 3}
    theirs = TheirTokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    theirs.add_special_tokens(["<pad>"])
    ours = Tokenizer(theirs.to_str())
    assert ours.encode(["bada"], 9)[0].tolist() == [3, 1]
    assert ours.begins_word.tolist() == [False, False, False, True]
    assert ours.spellings == ["", "da", "", " ba"]
    assert ours.special_tokens == (0,)


UNKNOWN = ["<pad>", "<unk>"]


def with_metaspace() -> TheirTokenizer:
    """Build a tokenizer like XLM-R's, of the pieces in the test below."""
    pieces = ["▁", "▁caf", "é", "▁Stra", "ß", "e", "\u6211", "\u559c\u6b22", "▁\u732b"]
    theirs = TheirTokenizer(models.Unigram([(each, -2.0) for each in [*UNKNOWN, *pieces]], unk_id=1))
    theirs.pre_tokenizer = pre_tokenizers.Metaspace()
    return theirs


def with_suffix() -> TheirTokenizer:
    """Build a tokenizer like GPT-1's and CLIP's, whose tokens show where words end."""
    tokens = [*UNKNOWN, "a", "d", "b", "a</w>", "d</w>", "da</w>"]
    theirs = TheirTokenizer(
        models.BPE(
            {name: number for number, name in enumerate(tokens)},
            [("d", "a</w>")],
            unk_token="<unk>",
            end_of_word_suffix="</w>",
        )
    )
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    return theirs


def of_whole_words() -> TheirTokenizer:
    vocabulary = {name: number for number, name in enumerate([*UNKNOWN, "ba", "da"])}
    theirs = TheirTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    return theirs


@pytest.mark.parametrize(
    ("make", "text", "begins"),
    [
        (with_metaspace, "caf\u00e9 Stra\u00dfe", "10100"),
        (with_metaspace, "\u6211\u559c\u6b22 \u732b", "1111"),
        (with_suffix, "bada a bd", "100110"),
        (of_whole_words, "ba da da ba", "1111"),
    ],
)
def test_words_are_found_by_the_marks_of_each_kind_of_tokenizer(
    make: Callable[[], TheirTokenizer], text: str, begins: str
) -> None:
    ours = Tokenizer(make().to_str())
    (row,) = ours.encode([text], 32)
    found = ours.begins_word[row]
    found[1:] |= ours.ends_word[row][:-1]
    found[0] = True
    assert ours.marks_words
    assert "".join(map(str, found.astype(int))) == begins


def test_spellings_have_no_marks_of_words() -> None:
    ours = Tokenizer(with_suffix().to_str())
    assert ours.spellings[2:] == ["a", "d", "b", "a", "d", "da"]


def test_names_of_special_tokens_in_a_text_are_unknown_if_the_model_finds_them() -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    theirs = TheirTokenizer(models.Unigram([(each, -2.0) for each in [*special, "▁", "▁x"]], unk_id=3))
    theirs.pre_tokenizer = pre_tokenizers.Metaspace()
    theirs.add_special_tokens(special)
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    ours = Tokenizer(theirs.to_str())
    (row,) = ours.encode(["x <pad> x </s><s>"], 32)
    assert row.tolist() == [1, 5, 4, 3, 5, 4, 3, 3, 2]  # 0 and 1 are swapped
    assert row.dtype == np.int32


def test_a_tokenizer_without_padding_is_refused() -> None:
    theirs = TheirTokenizer(models.WordPiece({"[UNK]": 0, "ba": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match=r"no token \[PAD\] or <pad>"):
        Tokenizer(theirs.to_str())


# Invalid texts


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "missing value"),
        (float("nan"), "missing value"),
        ("", "empty text"),
        (" \t\n\u00a0\u3000", "empty text"),
        (b"", "empty text"),
        (b"ba\xff", "invalid UTF-8"),
        ("ba\ud800", "invalid UTF-8"),
        (3, "int in place of a text"),
        (1.5, "float in place of a text"),
        (["ba"], "list in place of a text"),
        (InvalidTextError("no such file"), "no such file"),
    ],
)
def test_invalid_texts_have_a_cause(value: Any, cause: str) -> None:
    with pytest.raises(InvalidTextError, match=f"^{cause}$"):
        read_text(value)


@pytest.mark.parametrize("value", ["ba", " ba ", "b\u00e4", "\x00", "\u200b", "0", "x" * 10**6, "\U0001f600"])
def test_valid_texts_are_read_unchanged_from_strings_and_bytes(tokenizer: Tokenizer, value: str) -> None:
    assert read_text(value) == value
    assert read_text(value.encode()) == value
    assert tokenizer.encode([value], 4)[0].min() > 1


# Batches


def test_document_frequencies_equal_scikit_learns(tokenizer: Tokenizer) -> None:
    rows = tokenizer.encode(TEXTS[:200], 64)
    counts = np.stack([np.bincount(row, minlength=tokenizer.num_tokens) for row in rows])
    expected = TfidfTransformer().fit(counts).idf_
    came = inverse_document_frequency(iter(rows), tokenizer.num_tokens)
    assert came.dtype == np.float32
    np.testing.assert_allclose(came, expected, rtol=1e-6)
    common = np.argsort(counts.sum(0))[::-1]
    assert all(came[a] <= came[b] for a, b in pairwise(common[[0, len(common) // 4, -1]]))
