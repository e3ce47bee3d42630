"""The tokenizer, batches of tokens, and the vocabulary of a run."""

from raycl.tokenization.tokenizer import (
    PADDING,
    InvalidTextError,
    Tokenizer,
    padded,
    padded_rows,
    read_text,
    train_tokenizer,
)
from raycl.tokenization.vocabulary import Vocabulary, inverse_document_frequency

__all__ = [
    "PADDING",
    "InvalidTextError",
    "Tokenizer",
    "Vocabulary",
    "inverse_document_frequency",
    "padded",
    "padded_rows",
    "read_text",
    "train_tokenizer",
]
