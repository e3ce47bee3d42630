"""Views of texts: their dependencies, their equality with a loop over words, and their frequencies."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from raycl.augment import uniforms
from raycl.augment.text import TextAugmentation
from raycl.errors import ConfigError

CLS, SEP, NUM_TOKENS = 2, 3, 200
BEGINS_WORD = np.arange(NUM_TOKENS) % 3 != 0  # a third of the tokens continue a word
ALL = {"deletion": 0.3, "insertion": 0.4, "repetition": 0.5}
KINDS: list[dict[str, float]] = [{name: value} for name, value in ALL.items()] + [ALL]
WHEN: dict[str, Any] = {"seed": 7, "epoch": 2, "view": 1}


def texts(num_rows: int, *, most: int = 12, closed: bool = False, seed: int = 0) -> Tensor:
    """Draw rows of 1 to ``most`` tokens after [CLS], with [SEP] at the end if closed."""
    rng = np.random.default_rng(seed)
    rows = [
        [CLS, *rng.integers(5, NUM_TOKENS, rng.integers(1, most + 1)), *([SEP] if closed else [])]
        for _ in range(num_rows)
    ]
    return pad(rows)


def pad(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def listed(batch: Tensor) -> list[list[int]]:
    return [[token for token in row if token] for row in batch.tolist()]


def augmentation(**settings: Any) -> TextAugmentation:
    return TextAugmentation(**{"max_length": 500, "begins_word": BEGINS_WORD} | settings)


def ids(num_rows: int) -> np.ndarray:
    return np.arange(num_rows) * 11 - 5


# Reference implementation with loops


def words_of(row: list[int]) -> list[list[int]]:
    """Split a row into words; each special token is a word."""
    words: list[list[int]] = []
    for place, token in enumerate(row):
        begins = BEGINS_WORD[token] or token < 5 or place == 0 or row[place - 1] < 5
        words = [*words, [token]] if begins else [*words[:-1], [*words[-1], token]]
    return words


def draws_for(sample_id: np.ndarray, *, seed: int, epoch: int, view: int) -> list[list[list[float]]]:
    """Return each sample's draws of the five kinds."""
    kinds = [
        uniforms(sample_id, seed=seed + (number << 40), epoch=epoch, view=view, num=64).tolist()
        for number in range(1, 6)
    ]
    return [list(of_sample) for of_sample in zip(*kinds, strict=True)]


def view_of(row: list[int], draws: list[list[float]], settings: dict[str, float]) -> list[int]:
    """Return the view of one row, from the same draws."""
    deletions, insertions, choices, (share, *_), repetitions = draws
    if "deletion" in settings:
        words = words_of(row)
        own_chances = iter(deletions)
        chance = [2.0 if word[0] < 5 else next(own_chances) for word in words]
        own = [each for each in chance if each < 2]
        least = min(settings["deletion"], max(own, default=0))
        row = [token for word, each in zip(words, chance, strict=True) if each >= least for token in word]
    if "insertion" in settings:
        words = words_of(row)
        own = [word for word in words if word[0] >= 5]
        row, place = [], 0
        for word in words:
            row += word
            if word[0] >= 5:
                others = own[:place] + own[place + 1 :]
                if others and insertions[place] < settings["insertion"]:
                    row += others[int(choices[place] * len(others))]
                place += 1
    if "repetition" in settings:
        own = [place for place, token in enumerate(row) if token >= 5]
        most = min(len(own), max(2, int(settings["repetition"] * len(own))))
        num_repeated = int(share * (most + 1))
        order = sorted(range(len(own)), key=repetitions.__getitem__)
        repeated = {own[place] for place in order[:num_repeated]}
        row = [token for place, token in enumerate(row) for _ in range(2 if place in repeated else 1)]
    return row


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("closed", [False, True])
def test_views_equal_a_loop_over_the_words_of_each_text(settings: dict[str, float], closed: bool) -> None:
    tokens = texts(200, closed=closed)
    came = listed(augmentation(**settings)(tokens, ids(200), **WHEN))
    draws = draws_for(ids(200), **WHEN)
    expected = [view_of(row, own, settings) for row, own in zip(listed(tokens), draws, strict=True)]
    assert came == expected
    assert came != listed(tokens)


def test_without_a_lookup_each_token_is_a_word() -> None:
    tokens = texts(100)
    for settings in KINDS:
        each, none = (
            augmentation(**settings, begins_word=lookup)(tokens, ids(100), **WHEN)
            for lookup in (np.ones(NUM_TOKENS, np.bool_), None)
        )
        assert torch.equal(each, none)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_words_that_end_with_a_mark_change_as_words_that_begin_with_one(settings: dict[str, float]) -> None:
    firsts = 3 * np.random.default_rng(0).integers(2, 60, (100, 8)) + 1
    tokens = pad([[CLS, *(first + n for first in row for n in range(3))] for row in firsts.tolist()])
    numbers = np.arange(NUM_TOKENS)
    by_beginning, by_end = (
        augmentation(**settings, **lookups)(tokens, ids(100), **WHEN)
        for lookups in (
            {"begins_word": numbers % 3 == 1},
            {"begins_word": np.zeros(NUM_TOKENS, np.bool_), "ends_word": numbers % 3 == 0},
        )
    )
    assert torch.equal(by_beginning, by_end)
    assert listed(by_end) != listed(tokens)


# Dependencies of a view


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_view_does_not_depend_on_its_batch_or_its_padding(settings: dict[str, float]) -> None:
    tokens, change = texts(60), augmentation(**settings)
    whole = listed(change(tokens, ids(60), **WHEN))
    order = np.random.default_rng(0).permutation(60)
    assert listed(change(tokens[order], ids(60)[order], **WHEN)) == [whole[place] for place in order]
    for place, row in enumerate(listed(tokens)[:20]):
        alone = change(pad([row]), ids(60)[place : place + 1], **WHEN)
        wide = change(torch.nn.functional.pad(pad([row]), (0, 9)), ids(60)[place : place + 1], **WHEN)
        assert listed(alone) == listed(wide) == [whole[place]]
        assert alone.shape[1] == len(whole[place])


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_seed_epoch_view_and_sample_each_change_the_view(settings: dict[str, float]) -> None:
    tokens, change = texts(60), augmentation(**settings)
    views = [
        change(tokens, ids(60) + shift, **(WHEN | other))
        for shift, other in ((0, {}), (1, {}), (0, {"seed": 8}), (0, {"epoch": 3}), (0, {"view": 0}))
    ]
    assert len({str(listed(view)) for view in views}) == len(views)
    assert torch.equal(change(tokens, ids(60), **WHEN), views[0])


def test_each_row_may_have_its_own_epoch() -> None:
    tokens, change = texts(20), augmentation(**ALL)
    mixed = listed(change(tokens, ids(20), seed=0, epoch=np.arange(20) % 2, view=0))
    plain = [listed(change(tokens, ids(20), seed=0, epoch=epoch, view=0)) for epoch in (0, 1)]
    assert mixed == [plain[row % 2][row] for row in range(20)]


def test_arrays_and_tensors_give_the_same_views() -> None:
    tokens, change = texts(40), augmentation(**ALL)
    array = tokens.numpy().astype(np.int32)
    array.flags.writeable = False  # read-only, like Arrow's arrays
    came = change(array, torch.from_numpy(ids(40)), **WHEN)
    assert came.dtype == torch.int64
    assert torch.equal(came, change(tokens, ids(40), **WHEN))
    as_tensor = augmentation(**ALL, begins_word=torch.from_numpy(BEGINS_WORD))
    assert torch.equal(as_tensor(tokens, ids(40), **WHEN), came)


def test_a_repetition_does_not_change_the_draws_of_a_deletion() -> None:
    tokens = texts(80)
    alone, first = (augmentation(deletion=0.3, **more) for more in ({}, {"repetition": 1.0}))
    for row, repeated in zip(
        *(listed(each(tokens, ids(80), **WHEN)) for each in (alone, first)), strict=True
    ):
        assert set(row) == set(repeated)


# Invariants


@pytest.mark.parametrize("max_length", [2, 3, 8, 500])
def test_a_view_is_never_empty_never_too_long_and_keeps_cls_and_sep(max_length: int) -> None:
    tokens = texts(300, closed=True)
    for settings in ({"deletion": 1.0}, {"insertion": 1.0}, {"repetition": 1.0}, ALL, {}):
        for sample in (0, 1, 2):
            view = augmentation(**settings, max_length=max_length)(tokens, ids(300) + sample, **WHEN)
            assert view.shape[1] <= max_length
            for row, before in zip(listed(view), listed(tokens), strict=True):
                assert row[0] == CLS
                assert row[-1] == SEP
                assert CLS not in row[1:]
                assert SEP not in row[:-1]
                assert set(row) <= set(before)
                assert len(row) > 2 or max_length == 2


def test_a_text_without_a_closing_token_is_cut_at_the_limit() -> None:
    tokens = texts(50)
    whole, cut = (augmentation(insertion=1.0, max_length=most)(tokens, ids(50), **WHEN) for most in (500, 6))
    assert torch.equal(whole[:, :6], cut)


def test_one_whole_word_remains_when_all_are_deleted() -> None:
    tokens = texts(200)
    for row, before in zip(
        listed(augmentation(deletion=1.0)(tokens, ids(200), **WHEN)), listed(tokens), strict=True
    ):
        assert row[1:] in words_of(before)[1:]


def test_an_empty_augmentation_returns_its_input_and_empty_rows_stay_unchanged() -> None:
    tokens = texts(30)
    assert torch.equal(augmentation()(tokens, ids(30), **WHEN), tokens)
    special = torch.tensor([[1, 0], [2, 4], [0, 0]])  # the last row has no tokens at all
    for settings in KINDS:
        assert torch.equal(augmentation(**settings)(special, ids(3), **WHEN), special)
        padding = augmentation(**settings)(torch.zeros(2, 3, dtype=torch.int64), ids(2), **WHEN)
        assert listed(padding) == [[], []]
    nothing = torch.zeros(0, 4, dtype=torch.int64)
    assert augmentation(**ALL)(nothing, ids(0), **WHEN).shape == (0, 4)


# Frequencies


def distinct(num_rows: int, num_words: int) -> Tensor:
    """Return rows of distinct one-token words."""
    return torch.arange(5, 5 + num_words).repeat(num_rows, 1)


def test_each_word_is_deleted_with_the_given_probability() -> None:
    view = augmentation(deletion=0.2, begins_word=None)(distinct(5_000, 10), np.arange(5_000), **WHEN)
    left = Counter(token for row in listed(view) for token in row)
    for token in range(5, 15):  # standard error: sqrt(0.2 * 0.8 / 5,000) = 0.0057
        assert left[token] / 5_000 == pytest.approx(0.8, abs=0.025)


def test_each_other_word_is_inserted_equally_often_after_each_word() -> None:
    num_rows, num_words = 8_000, 4
    view = augmentation(insertion=0.25, begins_word=None)(
        distinct(num_rows, num_words), np.arange(num_rows), **WHEN
    )
    pairs: Counter[tuple[int, int]] = Counter()
    for row in listed(view):
        place = 0
        for word in range(5, 5 + num_words):
            assert row[place] == word
            after = row[place + 1 : place + 3]
            # A word is never followed by its own copy: the first token is a copy if the second is the next word.
            is_copy = after[1:] == [word + 1] or (word == 4 + num_words and len(after) == 1)
            if is_copy:
                pairs[word, after[0]] += 1
            place += 1 + is_copy
    counts = [pairs[word, other] for word in range(5, 9) for other in range(5, 9) if word != other]
    # Standard error of the share: sqrt(0.25 * 0.75 / 32,000) = 0.0024.
    assert sum(counts) / (num_rows * num_words) == pytest.approx(0.25, abs=0.01)
    assert sum(counts) == sum(pairs.values())
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize(("num_words", "most"), [(1, 1), (2, 2), (5, 2), (10, 3), (20, 6)])
def test_the_number_of_repetitions_is_uniform_up_to_esimcses_bound(num_words: int, most: int) -> None:
    view = augmentation(repetition=0.32, begins_word=None)(
        distinct(4_000, num_words), np.arange(4_000), **WHEN
    )
    added = np.array([len(row) - num_words for row in listed(view)])
    counts = np.bincount(added, minlength=most + 1)
    assert len(counts) == most + 1
    assert chisquare(counts).pvalue > 1e-4
    places = Counter(token for row in listed(view) for token, times in Counter(row).items() if times == 2)
    if num_words > 2:
        assert chisquare([places[token] for token in range(5, 5 + num_words)]).pvalue > 1e-4


# Errors


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"deletion": 1.1}, r"deletion is out of range, got 1.1; give a finite number in \[0, 1\]"),
        ({"insertion": -0.1}, "insertion is out of range"),
        ({"repetition": float("nan")}, "repetition is out of range"),
        ({"max_length": 0}, "max_length is too small, got 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        augmentation(**settings)


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (torch.ones(3, 4), "tokens must hold integers, got torch.float32"),
        (np.ones(3, np.int64), r"got 3 for \[3\]; give tokens \[n, length\]"),
        (np.ones((2, 4), np.int64), r"sample_id does not fit the tokens, got 3 for \[2, 4\]"),
        (np.full((3, 4), NUM_TOKENS), "begins_word does not fit the tokens, got 200 entries for token 200"),
    ],
)
def test_invalid_tokens_are_refused(tokens: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        augmentation(**ALL)(tokens, ids(3), **WHEN)
