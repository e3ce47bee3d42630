"""The hash of 64 bits that splits rows and counts draws; ``augment/rng.py`` has it for tensors on any device."""

from typing import Any

import numpy as np

# Increment and multipliers of splitmix64 (Steele, Lea & Flood, 2014).
INCREMENT = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


def mix(bits: Any) -> Any:
    """Mix the bits of a uint64, or of each number of an array (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND_MULTIPLIER)
        return bits ^ (bits >> np.uint64(31))
