"""Write a report: the page of one run, a comparison of several, or the page at the end of a run.

The drawing library takes a second to import, so that it is imported only when a page is written.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from raycl.errors import ConfigError, RayclError
from raycl.records import RESULT
from raycl.storage import Place, repeated

PAGE = "report.html"
COMPARISON = "comparison.html"


def write_report(run: str, output: str | None = None) -> Place:
    """Write the page of the run at ``run``, by default to ``report.html`` in it; return its address.

    In a folder as ``output`` it has that name too.

    Raises ``DataError`` if the output holds no run or nothing is logged, ``StorageError`` if a file cannot be
    read or written.
    """
    from raycl.report.page import render_run
    from raycl.report.run import read_run

    place = Place(run) / PAGE if output is None else _file(output, PAGE)
    return _write(place, render_run(read_run(run)))


def write_comparison(runs: Sequence[str], output: str = COMPARISON) -> Place:
    """Write one page about several runs; return its address. Raises as ``write_report``, and for a repeated run."""
    if twice := repeated(runs):
        raise ConfigError(f"{twice} is given twice; give each run once")
    from raycl.report.page import render_comparison
    from raycl.report.run import read_run

    page = render_comparison([read_run(run, with_snapshots=False) for run in runs])
    return _write(_file(output, COMPARISON), page)


@contextlib.contextmanager
def reported(output: str) -> Iterator[None]:
    """Write the page of the run inside when it ends, finished or failed, unless it was refused."""
    before = _result_written_at(output)
    try:
        yield
    except RayclError:
        if _result_written_at(output) != before:  # a refused run writes no result
            _report_at_the_end(output)
        raise
    _report_at_the_end(output)


def _file(output: str, name: str) -> Place:
    """Return the address of a page: the given one, or ``name`` in a folder."""
    place = Place(output)
    return place / name if output.endswith("/") or place.is_folder() else place


def _write(place: Place, page: str) -> Place:
    place.write_text(page)
    return place


def _result_written_at(output: str) -> float | None:
    """Return when the result was written: a run that fails again may write the same one."""
    with contextlib.suppress(RayclError):
        return Place(output).written_at().get(RESULT)
    return None


def _report_at_the_end(output: str) -> None:
    """Print the address of the page, or why there is none."""
    try:
        place = str(write_report(output))
    except (Exception, KeyboardInterrupt) as error:  # the exit status of the run must not change
        is_signal = isinstance(error, KeyboardInterrupt)
        text = "interrupted" if is_signal else str(error) if isinstance(error, RayclError) else repr(error)
        print(f"raycl: no report was written: {' '.join(text.split())[:500]}", file=sys.stderr)
    else:
        print(f"report: {place}", file=sys.stderr)
