"""Stores of negatives: the newest keys first in, first out; or one slot for every sample.

They are plain classes over numpy arrays, in the training process or in an actor, and know of
neither.
"""

from raycl.negatives.memory_bank import MemoryBank, draw_slots
from raycl.negatives.queue import KeyQueue
from raycl.negatives.store import Negatives, NegativeStore

__all__ = ["KeyQueue", "MemoryBank", "NegativeStore", "Negatives", "draw_slots"]
