"""Texts as tokens: the tokenizer, and batches of tokens, which padding fills up at the end."""

from raycl.tokenization.batches import PADDING, inverse_document_frequency, padded, padded_rows
from raycl.tokenization.tokenizer import BrokenTextError, Tokenizer, read_text, train_tokenizer
from raycl.tokenization.vocabulary import Vocabulary

__all__ = [
    "PADDING",
    "BrokenTextError",
    "Tokenizer",
    "Vocabulary",
    "inverse_document_frequency",
    "padded",
    "padded_rows",
    "read_text",
    "train_tokenizer",
]
