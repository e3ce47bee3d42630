"""The explorer's queries, independent of HTTP."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from raycl.errors import ConfigError, DataError
from raycl.negatives.search import Neighbors
from raycl.serve import schemas
from raycl.serve.reconnecting_bank import ReconnectingBank
from raycl.serve.sample_viewer import NoSampleError, SampleViewer


@final
class QueryEncoder:
    """Encode images and texts with the run's last checkpoint, reloaded when a newer one exists.

    Both methods return the embedding, float32 [dim], and the name of the checkpoint. They raise
    ``StorageError`` while there is no checkpoint, ``ConfigError`` if the run has another kind of data, and
    ``DataError`` for invalid content.
    """

    def __init__(self, run: str) -> None:
        """Store the address of the run; the first query loads its checkpoint."""
        self._run, self._encoder = run, None
        self._lock = threading.Lock()

    def embed_image(self, content: bytes) -> tuple[np.ndarray, str]:
        """Encode the content of an image file."""
        return self._embed(lambda encoder: encoder.embed_image(content))

    def embed_text(self, text: str) -> tuple[np.ndarray, str]:
        """Encode a text."""
        return self._embed(lambda encoder: encoder.embed_text(text))

    def _embed(self, embed: Callable[[Any], np.ndarray]) -> tuple[np.ndarray, str]:
        # Importing torch costs seconds and memory, which queries by id need not pay.
        from raycl.inference.checkpoint_encoder import last_checkpoint, load_checkpoint_encoder
        from raycl.storage import Place, absolute

        with self._lock:
            encoder = self._encoder
            if encoder is None or encoder.checkpoint != last_checkpoint(Place(absolute(self._run))):
                self._encoder = encoder = load_checkpoint_encoder(self._run)
            return embed(encoder), encoder.checkpoint


@final
@dataclass(frozen=True, kw_only=True)
class Explorer:
    """Answer queries about a bank; every method raises ``RunError`` while the bank is unreachable.

    ``queries`` are the kinds of queries allowed beside ids.
    """

    bank: ReconnectingBank
    encoder: QueryEncoder | None = None
    samples: SampleViewer | None = None
    queries: tuple[schemas.QueryKind, ...] = ()

    def stats(self) -> schemas.Stats:
        """Return the statistics of the bank."""
        stats = self.bank.stats()
        return schemas.Stats(
            **asdict(stats)
            | {"age_histogram": [{"below": b, "rows": rows} for b, rows in stats.age_histogram]},
            run=stats.output,
            questions=self.bank.num_answered,
            queries=["id", *self.queries],
            shows_samples=self.samples is not None,
        )

    def nearest_to_sample(self, sample_id: int, k: int) -> schemas.Neighbors:
        """Find the rows nearest to the newest row of a sample; raises ``UnknownSampleError``."""
        return self._neighbors(self.bank.nearest_to_sample(sample_id, k))

    def nearest_to_image(self, content: bytes, k: int) -> schemas.Neighbors:
        """Find the rows nearest to an image; raises the errors of :class:`QueryEncoder`."""
        embedding, checkpoint = self._encoder_for("image").embed_image(content)
        return self._neighbors(self.bank.nearest(embedding, k), checkpoint)

    def nearest_to_text(self, text: str, k: int) -> schemas.Neighbors:
        """Find the rows nearest to a text; raises the errors of :class:`QueryEncoder`."""
        if not text.strip():
            raise DataError("the text is empty; type one")
        embedding, checkpoint = self._encoder_for("text").embed_text(text)
        return self._neighbors(self.bank.nearest(embedding, k), checkpoint)

    def rows(self, sample_id: int) -> schemas.Rows:
        """Return the rows of a sample, newest first; raises ``UnknownSampleError``."""
        found = self.bank.rows_of(sample_id)
        norms = np.linalg.norm(found.rows.astype(np.float32), axis=1).tolist()
        newest = max(self.bank.newest_step(), int(found.step.max()))
        by_step = sorted(zip(found.step.tolist(), norms, strict=True), reverse=True)
        rows = [
            schemas.Row(step=step if step >= 0 else None, age=newest - step if step >= 0 else None, norm=norm)
            for step, norm in by_step
        ]
        return schemas.Rows(sample_id=str(sample_id), rows=rows)

    def sample(self, sample_id: int) -> schemas.Sample:
        """Return a sample as a person sees it; raises ``NoSampleError``."""
        if self.samples is None:
            raise NoSampleError("samples cannot be shown without a data set; start the explorer with --data")
        return self.samples.show(sample_id)

    def _neighbors(self, found: Neighbors, checkpoint: str | None = None) -> schemas.Neighbors:
        # A row may have been written after the last statistics.
        newest = max(self.bank.newest_step(), int(found.step.max(initial=0)))
        norms = self.bank.norms_of(found)
        columns = found.sample_id.tolist(), found.similarity.tolist(), found.step.tolist(), norms
        neighbors = [
            schemas.Neighbor(
                sample_id=str(sample_id), similarity=similarity, step=step, age=newest - step, norm=norm
            )
            for sample_id, similarity, step, norm in zip(*columns, strict=True)
        ]
        return schemas.Neighbors(neighbors=neighbors, checkpoint=checkpoint)

    def _encoder_for(self, kind: schemas.QueryKind) -> QueryEncoder:
        if self.encoder is None or kind not in self.queries:
            allowed = " or ".join(("id", *self.queries))
            raise ConfigError(f"this run does not encode queries by {kind}; query by {allowed}")
        return self.encoder
