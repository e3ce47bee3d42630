"""A trained encoder at work: embedding whole sets, and evaluation on them."""
