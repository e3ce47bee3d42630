"""A prompt equals the same words written into the data, in training and in use, and stays as it is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
from tokenizers import processors
from torch import Tensor

from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml, override
from raycl.errors import ConfigError
from raycl.inference.embed import embed_to_parquet, formats_of
from raycl.inference.encoder import load_checkpoint_encoder
from raycl.models.towers import Towers
from raycl.recipes import recipe
from raycl.tokenization import Tokenizer
from raycl.training.data_module import check_prompts
from raycl.training.transforms import build_transform
from tests.pairs import clicks, noise_images, rows_of, small_config, vocabulary
from tests.test_checkpoint_encoder import list_checkpoint, write_checkpoint
from tests.test_saved_text import load_texts
from tests.texts import invented_texts
from tests.towers import save

QUERY, DOCUMENT = "ask: ", "a page - "
TEXTS = invented_texts(9, seed=5)
PROMPTS = {
    "two_tower": {"text.query_prompt": QUERY, "text.document_prompt": DOCUMENT},
    "simcse": {"text.query_prompt": QUERY},
    "clip": {"text.document_prompt": DOCUMENT},
}
OF_ROLES = {"text": QUERY, "query": QUERY, "document": DOCUMENT, "negatives": DOCUMENT, "caption": DOCUMENT}
VALUES: dict[str, dict[str, list[Any]]] = {
    "two_tower": clicks(12, num_negatives=[0, 2, 1]),
    "simcse": {"text": [TEXTS[:2], *TEXTS[2:]]},
    "clip": {"image": noise_images(9), "caption": [TEXTS[:3], *TEXTS[1:]]},
}


def written(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the values with the prompts as a part of the texts."""

    def after(prompt: str, value: Any) -> Any:
        return [prompt + each for each in value] if isinstance(value, list) else prompt + value

    return {
        role: [after(OF_ROLES[role], value) for value in column] if role in OF_ROLES else column
        for role, column in values.items()
    }


@pytest.mark.parametrize("recipe", PROMPTS)
def test_a_prompt_gives_the_batches_of_data_with_the_prompt_in_each_text(recipe: str) -> None:
    plain, prompted = small_config(recipe), small_config(recipe, PROMPTS[recipe])
    found = inputs(prompted, VALUES[recipe])
    expected = inputs(plain, written(VALUES[recipe]))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, found, inputs(plain, VALUES[recipe])))


def inputs(config: RunConfig, values: dict[str, list[Any]]) -> list[Tensor]:
    """Return all that a step and the evaluation read of these rows."""
    rows = rows_of(config, values)
    batch, transform = rows.take(np.arange(len(rows))), build_transform(config, vocabulary().tokenizer)
    drawn = [
        *(transform.view(batch, number) for number in (0, 1)),
        transform.plain(batch),
        transform.plain_key(batch),
    ]
    _, negatives = transform.ids_and_negatives(batch)
    found = [each.on(torch.device("cpu")) for each in drawn] + [transform.plain_key_id(batch)]
    return found if negatives is None else [*found, negatives]


@pytest.mark.parametrize("towers", [False, True], ids=["one tower", "two towers"])
@pytest.mark.parametrize("query_prompt", [QUERY, ""], ids=["both prompts", "a prompt of documents"])
def test_each_side_of_a_saved_encoder_applies_its_prompt_once(
    query_prompt: str, towers: bool, tmp_path: Path
) -> None:
    settings = {"separate_towers": towers}
    plain = small_config(settings=settings)
    prompted = small_config(
        settings=settings | {"text.query_prompt": query_prompt, "text.document_prompt": DOCUMENT}
    )
    save(plain, tmp_path / "plain")
    write_unfinished(prompted, save(prompted, tmp_path / "prompted"), tmp_path / "unfinished")
    for side, prompt in (("query", query_prompt), ("key", DOCUMENT)):
        expected = load_texts(tmp_path / "plain", side).encode([prompt + text for text in TEXTS])
        for run in ("prompted", "unfinished"):
            loaded = load_texts(tmp_path / run, side)
            assert torch.equal(loaded.encode(TEXTS), expected)
            # `raycl embed`, mining and evaluation decode in this format.
            rows = formats_of(loaded)["text"].decode_all(TEXTS)
            assert [list(row) for (row,) in rows] == [unpadded(row) for row in loaded.prepare(TEXTS)]
    asked = load_checkpoint_encoder(str(tmp_path / "unfinished")).embed("text", "one")
    query = load_texts(tmp_path / "prompted").encode(["one"])
    assert np.allclose(asked, torch.nn.functional.normalize(query, dim=1)[0], atol=1e-6)


def test_a_list_of_texts_is_embedded_by_its_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    save(small_config("simcse", PROMPTS["simcse"]), tmp_path / "run")
    lists = [[text, "another"] for text in TEXTS[:-2]] + [TEXTS[-2:], []]
    pq.write_table(pa.table({"text": lists}), tmp_path / "lists.parquet")
    rows = embed_to_parquet(
        str(tmp_path / "run"),
        tmp_path / "lists.parquet",
        tmp_path / "out",
        max_invalid_fraction=0.5,
        quiet=True,
    )
    found = pq.read_table(tmp_path / "out")["representation"].to_pylist()
    expected = load_texts(tmp_path / "run").encode([each[0] for each in lists[:-1]])
    torch.testing.assert_close(torch.tensor(found), expected)
    assert (rows.num_rows, dict(rows.invalid)) == (len(lists), {"empty list of texts": 1})


def unpadded(row: Tensor) -> list[int]:
    return row[row != 0].tolist()


@pytest.mark.parametrize(("recipe", "sides"), [("simcse", ["query", "key"]), ("clip", ["key"])])
def test_a_saved_encoder_of_sentences_or_captions_applies_its_prompt(
    recipe: str, sides: list[Any], tmp_path: Path
) -> None:
    save(small_config(recipe), tmp_path / "plain")
    save(small_config(recipe, PROMPTS[recipe]), tmp_path / "prompted")
    (prompt,) = PROMPTS[recipe].values()
    for side in sides:
        expected = load_texts(tmp_path / "plain", side).encode([prompt + text for text in TEXTS])
        assert torch.equal(load_texts(tmp_path / "prompted", side).encode(TEXTS), expected)
        # For `encode_query` of sentence-transformers too.
        assert load_texts(tmp_path / "prompted", side).spec.prompts == {"query": prompt, "key": prompt}


def test_a_question_to_a_run_of_captions_gets_their_prompt(tmp_path: Path) -> None:
    for name, settings in (("plain", {}), ("prompted", PROMPTS["clip"])):
        config = small_config("clip", settings)
        write_unfinished(config, save(config, tmp_path / f"saved {name}"), tmp_path / name)
    expected = load_checkpoint_encoder(str(tmp_path / "plain")).embed("text", DOCUMENT + "one")
    assert np.array_equal(load_checkpoint_encoder(str(tmp_path / "prompted")).embed("text", "one"), expected)


def write_unfinished(config: RunConfig, towers: Towers, run: Path) -> None:
    """Write the files of a run that has a checkpoint and no saved encoder."""
    write_checkpoint(run, 5, {"tower": towers.state_dict()})
    (run / "config.yaml").write_text(config_to_yaml(config))
    (run / "tokenizer.json").write_text(vocabulary().tokenizer.to_json())
    list_checkpoint(run, 5)


def closed_tokenizer() -> Tokenizer:
    """Return the tokenizer of synthetic texts, which puts each text between [CLS] and [SEP]."""
    tokenizer = tokenizers.Tokenizer.from_str(vocabulary().tokenizer.to_json())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return Tokenizer(tokenizer.to_str())


@pytest.mark.parametrize("closed", [False, True], ids=["words alone", "between special tokens"])
@pytest.mark.parametrize(
    "changes", [{"repetition": 0.9}, {"deletion": 0.6}, {"insertion": 0.6, "deletion": 0.3}], ids=str
)
def test_word_changes_act_on_the_words_after_the_prompt_as_without_one(
    changes: dict[str, float], closed: bool
) -> None:
    tokenizer = closed_tokenizer() if closed else vocabulary().tokenizer
    settings = {f"text_augment.{name}": value for name, value in changes.items()}
    words = views(settings | {"text.max_length": 200}, tokenizer)
    prompted = views(settings | {"text.max_length": 200} | PROMPTS["simcse"], tokenizer)
    (prompt,) = tokenizer.encode([QUERY.strip()], 200)
    prompt = prompt[:-1] if closed else prompt
    for with_prompt, without in zip(prompted, words, strict=True):
        assert unpadded(with_prompt) == [*prompt, *unpadded(without)[closed:]]
    # The cut counts the prompt.
    short = views(settings | {"text.max_length": 12} | PROMPTS["simcse"], tokenizer)
    assert short.shape[1] == 12
    assert all(unpadded(row)[: len(prompt)] == list(prompt) for row in short)
    assert (short == 3).sum() == closed * len(TEXTS)


def views(settings: dict[str, Any], tokenizer: Tokenizer) -> Tensor:
    """Return a random view of each text."""
    config = small_config("simcse", settings)
    batch = rows_of(config, {"text": TEXTS}, tokenizer).take(np.arange(len(TEXTS)))
    return build_transform(config, tokenizer).view(batch, 1).on(torch.device("cpu"))


def test_a_prompt_that_leaves_no_room_for_a_text_is_refused() -> None:
    text, tokenizer = small_config().text, vocabulary().tokenizer
    num_tokens = tokenizer.num_prompt_tokens(QUERY)
    assert num_tokens == len(tokenizer.encode([QUERY.strip()], 64)[0]) > 1
    for name, setting in (("query_prompt", "max_length"), ("document_prompt", "max_document_length")):
        long = text.model_copy(update={name: QUERY, setting: num_tokens})
        with pytest.raises(ConfigError, match=f"text.{name} has {num_tokens} tokens, .* after {num_tokens};"):
            check_prompts(long, tokenizer)
        check_prompts(long.model_copy(update={setting: num_tokens + 1}), tokenizer)


def test_a_prompt_that_yaml_reads_as_a_mapping_is_refused_with_the_right_quotes() -> None:
    message = r"text.query_prompt: quote the prompt within the value.*YAML read \{'query': None\}"
    with pytest.raises(ConfigError, match=message):
        override(recipe("two_tower"), ["text.query_prompt=query: "])
