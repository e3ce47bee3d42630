"""The explorer: a page and a JSON API over the bank of a live run."""
