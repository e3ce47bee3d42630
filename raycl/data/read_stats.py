"""Counts of the rows read from a data set, with the invalid ones by cause."""

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from raycl.errors import DataError, InvalidValueError

NUM_EXAMPLES = 3
_MOST_CHARACTERS = 120  # of a detail


@final
@dataclass(kw_only=True)
class ReadStats:
    """Counts of rows: ``num_train`` are valid and not held out, ``skipped`` ones are valid but unused.

    ``num_flat`` rows are used, although all pixels of their image are equal. ``fingerprint`` is the sum of the hashes of
    the contents of valid rows modulo 2**64, or 0.
    """

    num_rows: int = 0
    num_train: int = 0
    num_flat: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    fingerprint: int = field(default=0, repr=False)

    def merge(self, other: "ReadStats") -> None:
        """Add the counts of other rows."""
        self.num_rows += other.num_rows
        self.num_train += other.num_train
        self.num_flat += other.num_flat
        self.invalid.update(other.invalid)
        self.skipped.update(other.skipped)
        self.examples = (self.examples + other.examples)[:NUM_EXAMPLES]
        self.fingerprint = (self.fingerprint + other.fingerprint) % 2**64

    @property
    def num_invalid(self) -> int:
        """The number of invalid rows, for any cause."""
        return self.invalid.total()

    def add_invalid(self, where: str, cause: InvalidValueError) -> None:
        """Count an invalid row; ``where`` names it among the examples, with the detail of the cause."""
        self.invalid[str(cause)] += 1
        if len(self.examples) < NUM_EXAMPLES:
            detail = f": {_shortened(cause.detail)}" if cause.detail else ""
            self.examples.append(f"{where} ({cause}{detail})")

    def describe_invalid(self) -> str:
        """Return the counts by cause and the first examples, in one line."""
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.invalid.items()))
        return f"{causes}; for example {'; '.join(self.examples)}"

    def check(self, max_invalid_fraction: float | None, *, min_rows: int = 0) -> None:
        """Raise ``DataError`` if more than this fraction of at least ``min_rows`` rows is invalid.

        With None, no invalid row is allowed, and no setting can change that.
        """
        if self.num_rows < min_rows or self.num_invalid <= (max_invalid_fraction or 0) * self.num_rows:
            return
        found = f"{self.num_invalid} of {self.num_rows} rows are invalid ({self.describe_invalid()})"
        if max_invalid_fraction is None:
            raise DataError(f"{found}; fix or remove them")
        raise DataError(f"{found}, more than the fraction {max_invalid_fraction:g} allowed; {self._remedy()}")

    def _remedy(self) -> str:
        if 2 * self.num_invalid > self.num_rows:
            return "fix the data"
        enough = (100 * self.num_invalid // self.num_rows + 1) / 100
        return f"fix the data, or allow them by --set data.max_invalid_fraction={enough:g}"


def _shortened(text: str) -> str:
    """Return the beginning and the end of a long text, in one line."""
    line = "".join(each if each.isprintable() else "?" for each in text)
    half = _MOST_CHARACTERS // 2
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:half]}...{line[-half:]}"
