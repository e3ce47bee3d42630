"""The page that a run ends with."""

import contextlib
import sys
from collections.abc import Iterator

from raycl.errors import RayclError
from raycl.records import RESULT
from raycl.storage import Place


@contextlib.contextmanager
def reported(output: str) -> Iterator[None]:
    """Write the page of the run within when it ends, finished or failed; not if it was refused."""
    before = _result_of(output)
    try:
        yield
    except RayclError:
        if _result_of(output) != before:  # a run that is refused writes none
            _report_at_the_end(output)
        raise
    _report_at_the_end(output)


def _result_of(output: str) -> str | None:
    with contextlib.suppress(RayclError):
        place = Place(output) / RESULT
        return place.read_text() if place.exists() else None
    return None


def _report_at_the_end(output: str) -> None:
    """Say where the page lies; what hinders it is told, and hinders nothing else."""
    try:
        from raycl.report.writing import write_report  # drawing takes a second to import: not before a run

        place = str(write_report(output))
    except (Exception, KeyboardInterrupt) as error:  # a drawing must not cost a run its exit status
        text = str(error) if isinstance(error, RayclError) else repr(error)
        print(f"raycl: no report was written: {' '.join(text.split())[:500]}", file=sys.stderr)
    else:
        print(f"report: {place}", file=sys.stderr)
