"""What the explorer can be asked, apart from HTTP."""

from dataclasses import asdict, dataclass
from typing import final

import numpy as np

from raycl.errors import ConfigError, DataError
from raycl.negatives.search import Neighbors
from raycl.serve import schemas
from raycl.serve.query_encoder import QueryEncoder
from raycl.serve.reconnecting_bank import ReconnectingBank
from raycl.serve.sample_viewer import NoSampleError, SampleViewer


@final
@dataclass(frozen=True, kw_only=True)
class Explorer:
    """A bank, what encodes a query for it, and where its samples can be seen.

    ``queries`` are what one may ask with beside an id. Every question raises ``RunError`` while the
    bank is away.
    """

    bank: ReconnectingBank
    encoder: QueryEncoder | None = None
    samples: SampleViewer | None = None
    queries: tuple[schemas.Queries, ...] = ()

    def stats(self) -> schemas.Stats:
        """Count and measure the bank."""
        stats = self.bank.stats()
        facts = asdict(stats)
        facts["run"] = facts.pop("output")
        facts["age_histogram"] = [{"below": below, "rows": rows} for below, rows in stats.age_histogram]
        return schemas.Stats(
            **facts,
            questions=self.bank.num_answered,
            queries=["id", *self.queries],
            shows_samples=self.samples is not None,
        )

    def nearest_of_sample(self, sample_id: int, k: int) -> schemas.Neighbors:
        """Find what is nearest to the newest row of a sample; raises ``UnknownSampleError``."""
        return self._tell(self.bank.nearest_of(sample_id, k))

    def nearest_of_image(self, content: bytes, k: int) -> schemas.Neighbors:
        """Find what is nearest to an image; raises what :class:`QueryEncoder` does."""
        query, checkpoint = self._encoder_of("image").of_image(content)
        return self._tell(self.bank.nearest(query, k), checkpoint)

    def nearest_of_text(self, text: str, k: int) -> schemas.Neighbors:
        """Find what is nearest to a text; raises what :class:`QueryEncoder` does."""
        if not text.strip():
            raise DataError("the text is empty; type one to ask with")
        query, checkpoint = self._encoder_of("text").of_text(text)
        return self._tell(self.bank.nearest(query, k), checkpoint)

    def rows(self, sample_id: int) -> schemas.Rows:
        """Return the rows of a sample, newest first; raises ``UnknownSampleError``."""
        found = self.bank.rows_of(sample_id)
        norms = np.linalg.norm(found.rows.astype(np.float32), axis=1).tolist()
        newest = max(self.bank.newest_step(), int(found.step.max()))
        rows = [
            schemas.Row(step=step, age=newest - step, norm=norm)
            if step >= 0
            else schemas.Row(step=None, age=None, norm=norm)
            for step, norm in sorted(zip(found.step.tolist(), norms, strict=True), reverse=True)
        ]
        return schemas.Rows(sample_id=str(sample_id), rows=rows)

    def sample(self, sample_id: int) -> schemas.Sample:
        """Return a sample as a person sees it; raises ``NoSampleError``."""
        if self.samples is None:
            raise NoSampleError("no set to show samples of was named; start the explorer with --data")
        shown = self.samples.show(sample_id)
        texts = [schemas.Text(role=role, text=text) for role, text in shown.texts]
        return schemas.Sample(sample_id=str(sample_id), image=shown.image, texts=texts, label=shown.label)

    def _tell(self, found: Neighbors, checkpoint: str | None = None) -> schemas.Neighbors:
        # A row may have been written after the bank was counted.
        newest = max(self.bank.newest_step(), int(found.step.max(initial=0)))
        parts = zip(
            found.sample_id.tolist(),
            found.similarity.tolist(),
            found.step.tolist(),
            self.bank.norms_of(found),
            strict=True,
        )
        neighbors = [
            schemas.Neighbor(
                sample_id=str(sample_id), similarity=similarity, step=step, age=newest - step, norm=norm
            )
            for sample_id, similarity, step, norm in parts
        ]
        return schemas.Neighbors(neighbors=neighbors, checkpoint=checkpoint)

    def _encoder_of(self, kind: schemas.Queries) -> QueryEncoder:
        if self.encoder is None or kind not in self.queries:
            allowed = " or ".join(("id", *self.queries))
            raise ConfigError(f"this run's samples cannot be asked for by {kind}; ask by {allowed}")
        return self.encoder
