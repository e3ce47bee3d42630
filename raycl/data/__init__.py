"""Data, read by Ray Data: sources, decoding, and equal batches for every worker."""
