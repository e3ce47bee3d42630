"""What ``raycl report`` does: writes the page of a run, or one page about several."""

from collections.abc import Sequence

from raycl.errors import ConfigError


def report(runs: Sequence[str], *, run: str | None, output: str | None) -> None:
    """Write the page and say where it lies; ``run`` is one more run. Raises ``ConfigError``, ``DataError``, ..."""
    asked = [*runs, *([] if run is None else [run])]
    if not asked:
        raise ConfigError("report needs a run: raycl report RUN, or several to compare them")
    if len(set(asked)) < len(asked):
        twice = next(each for each in asked if asked.count(each) > 1)
        raise ConfigError(f"{twice} is named twice; name each run once")
    from raycl.report.writing import COMPARISON, write_comparison, write_report

    if len(asked) == 1:
        print(write_report(asked[0], output))
    else:
        print(write_comparison(asked, output or COMPARISON))
