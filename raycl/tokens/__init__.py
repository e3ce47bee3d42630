"""Texts as tokens: the tokenizer, and batches of tokens, which padding fills up at the end."""

from raycl.tokens.batches import PADDING, inverse_document_frequency
from raycl.tokens.tokenizer import BrokenTextError, Tokenizer, read_text, train_tokenizer

__all__ = [
    "PADDING",
    "BrokenTextError",
    "Tokenizer",
    "inverse_document_frequency",
    "read_text",
    "train_tokenizer",
]
