"""A trained encoder at work: embedding whole sets, and being judged on them."""
