"""Run every benchmark beside its peers, one after the other, and write docs/performance.md.

    python benchmarks/run.py --data FOLDER [--only NAME ...] [--quick] [--output benchmarks/results]
        [--again] [--write docs/performance.md]

FOLDER holds cifar10/train.parquet, cifar10/test.parquet and medquad/train.parquet. Each benchmark is a process
of its own, within which the sides take turns; its result is OUTPUT/NAME.json. Existing results are
kept, so that the same command resumes a stopped one. Run nothing else at the same time for quiet numbers;
all benchmarks together take some hours.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparisons import AbsentError, Benchmark
from measuring import FOLDER, describe_machine, make_parser
from performance_page import check_page, read_measured, write_page
from suite import SUITE

RECORD = ".record.json"  # beside each result: command, commit, machine, date and seconds


def main() -> None:
    """Run the chosen benchmarks; the status is 1 if one of them failed."""
    options = read_options()
    options.output.mkdir(parents=True, exist_ok=True)
    failed = run_all(options.benchmarks, options)
    results, records = read_results(options.output)
    for benchmark in options.benchmarks:
        if benchmark.name in results:
            for line in read_measured(benchmark, results, records):
                print(f"absent: {line}" if isinstance(line, AbsentError) else line)
    if options.write:
        write_page(options.write, SUITE, results, records, pictures=options.output)
        print(f"{options.write} is written")
    if failed:
        sys.exit(f"{len(failed)} of {len(options.benchmarks)} failed: {', '.join(failed)}")


def run_all(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> list[str]:
    """Run one after the other; return the names of those that failed."""
    began, failed = time.monotonic(), []
    for number, benchmark in enumerate(benchmarks, 1):
        so_far = f"{(time.monotonic() - began) / 60:.0f} min so far"
        print(f"[{number} of {len(benchmarks)}, {so_far}] {benchmark.name}", end=": ", flush=True)
        if is_there(benchmark, options) and not options.again:
            print("there already")
        elif fault := run(benchmark, options):
            print(f"{benchmark.name} failed: {fault}", file=sys.stderr, flush=True)
            failed.append(benchmark.name)
    return failed


def is_there(benchmark: Benchmark, options: argparse.Namespace) -> bool:
    """Whether there is a result of the same flags: a quick try does not replace a measurement."""
    result, words = options.output / f"{benchmark.name}.json", benchmark.words(quick=options.quick)
    return result.exists() and read_record(result).get("words", words) == words


def run(benchmark: Benchmark, options: argparse.Namespace) -> str | None:
    """Run one and store its result; return an error, if any."""
    words = benchmark.words(quick=options.quick)
    if needed := missing_files(words, options.data):
        return f"it needs {' and '.join(needed)} in the folder of --data"
    # Only complete results get the final name.
    part, whole = (options.output / f"{benchmark.name}{ending}.json" for ending in (".part", ""))
    given = [word.format(data=options.data, output=options.output) for word in words]
    command = [sys.executable, str(FOLDER / given[0]), *given[1:], "--json", str(part)]
    print(" ".join(given), flush=True)
    record: dict[str, Any] = {"words": words, "machine": describe_machine()}
    record |= {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    began = time.monotonic()
    part.unlink(missing_ok=True)
    status = subprocess.run(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, check=False).returncode
    if status or not part.exists():
        return f"status {status}" if status else "it wrote no result"
    record["seconds"] = time.monotonic() - began
    part.replace(whole)
    whole.with_suffix(RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return None


def missing_files(words: Sequence[str], data: Path | None) -> list[str]:
    """Return the missing data files."""
    files = [word.removeprefix("{data}/") for word in words if word.startswith("{data}/")]
    return [file for file in files if data is None or not (data / file).exists()]


def commit() -> str:
    """Return the measured commit, as git describes it."""
    command = ["git", "describe", "--always", "--dirty= with changes", "--exclude=*"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    found = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def read_results(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return results and their records by name; report unreadable ones."""
    results, records = {}, {}
    for benchmark in SUITE:
        path = folder / f"{benchmark.name}.json"
        if path.exists():
            try:
                results[benchmark.name] = json.loads(path.read_text())
            except ValueError as error:
                print(f"{path} is not JSON ({error}); --again replaces it", file=sys.stderr)
            records[benchmark.name] = read_record(path)
    return results, records


def read_record(result: Path) -> dict[str, Any]:
    """Return the record of a result; empty for a script that was run by hand."""
    record = result.with_suffix(RECORD)
    return json.loads(record.read_text()) if record.exists() else {}


def read_options() -> argparse.Namespace:
    """Read the command line; refuse flags that would fail hours later."""
    parser = make_parser(__doc__, reports=False, data=None, output=None, write=None, quick=False, again=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these; without it, all")
    options = parser.parse_args()
    by_name = {benchmark.name: benchmark for benchmark in SUITE}
    names = options.only or list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        parser.exit(2, f"unknown benchmark {', '.join(unknown)}; choose {', '.join(by_name)}\n")
    options.benchmarks = [by_name[name] for name in names]
    options.output = Path(options.output or FOLDER / "results" / ("quick" if options.quick else ""))
    options.data = options.data and Path(options.data)
    options.write = options.write and Path(options.write)
    if options.write and (fault := check_page(options.write)):
        parser.exit(2, f"{fault}\n")
    return options


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        sys.exit(130)
