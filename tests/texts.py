"""Synthetic texts with repeated words, the same in every process."""

from random import Random

import tokenizers
from tokenizers import models, processors

from raycl.tokenization import Tokenizer


def invented_texts(num_texts: int = 1_500, *, seed: int = 0) -> list[str]:
    """Return sentences of 3 to 25 words from a vocabulary of 400 words with 1 to 6 syllables."""
    random = Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(random.choices(syllables, k=random.randint(1, 6))) for _ in range(400)]
    sentences = [random.choices(words, k=random.randint(3, 25)) for _ in range(num_texts)]
    return [" ".join(words) + random.choice(".!?") for words in sentences]


def with_cls(tokenizer: Tokenizer, *, is_wordpiece: bool = False) -> Tokenizer:
    """Return a tokenizer that begins each text with [CLS], with the longest subwords that fit if ``is_wordpiece``."""
    theirs = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    theirs.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A", pair="[CLS] $A [SEP] $B", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    if is_wordpiece:
        theirs.model = models.WordPiece(  # type: ignore[assignment]
            theirs.get_vocab(), unk_token="[UNK]", continuing_subword_prefix=""
        )
    return Tokenizer(theirs.to_str())
