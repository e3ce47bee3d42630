"""Stores of negatives: a queue of the newest keys, and a memory bank with a slot for every sample.

Both are plain classes over numpy arrays. A training process holds them itself, or the actors of a
bank hold them for all workers and answer questions from any process.
"""

from raycl.negatives.memory_bank import MemoryBank, draw_slots
from raycl.negatives.queue import KeyQueue
from raycl.negatives.store import Negatives

__all__ = ["KeyQueue", "MemoryBank", "Negatives", "draw_slots"]
