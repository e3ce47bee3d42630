"""The run's own encoder, for a picture or a text as a query."""

import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np


@final
class QueryEncoder:
    """Encode by the run's last checkpoint, which is loaded when it is asked for, and again when there is a newer one.

    Both questions return the embedding, float32 [dim], and the name of the checkpoint. They raise
    ``StorageError`` while there is no checkpoint, ``ConfigError`` if the run has no such samples, and
    ``DataError`` for what cannot be used.
    """

    def __init__(self, run: str) -> None:
        """Take the address of the run; nothing is read yet."""
        self._run, self._saved = run, None
        self._one_at_a_time = threading.Lock()

    def of_image(self, content: bytes) -> tuple[np.ndarray, str]:
        """Encode the content of an image file."""
        return self._embed(lambda saved: saved.embed_image(content))

    def of_text(self, text: str) -> tuple[np.ndarray, str]:
        """Encode a text."""
        return self._embed(lambda saved: saved.embed_text(text))

    def _embed(self, embed: Callable[[Any], np.ndarray]) -> tuple[np.ndarray, str]:
        # Torch takes seconds and memory, which nobody pays who asks by id.
        from raycl.inference.checkpoint_encoder import last_checkpoint, load_tower
        from raycl.storage import Place, absolute

        with self._one_at_a_time:
            saved = self._saved
            if saved is None or saved.checkpoint != last_checkpoint(Place(absolute(self._run))):
                self._saved = saved = load_tower(self._run)
            return embed(saved), saved.checkpoint
