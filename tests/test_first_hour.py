"""The first-hour page: each file was written by an earlier step; a drill runs the full page."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycl.demo.digits import write_digits
from raycl.errors import StorageError
from raycl.records import last_checkpoint, read_result
from raycl.storage import Place
from tests.test_docs import _BLOCK, DOCS, Block, Command, commands_in, parse

PAGE = "docs/first-hour.md"
TEXT = (DOCS / "first-hour.md").read_text()
READ = ("data", "run", "runs", "train", "test", "image", "recipe")
IN_A_CLUSTER = "ray job submit"  # its data is on S3
INSTALL = ("pip ", "uv ", "source ", "export ")


def sections() -> list[tuple[str, list[Block]]]:
    """Return the titles of the page with the blocks below each."""
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    return [
        (part.splitlines()[0], [Block(PAGE, found[2], found[3]) for found in _BLOCK.finditer(part)])
        for part in parts
    ]


def lines_of(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else []


def named_by(values: dict[str, Any]) -> Iterator[str]:
    """Yield the local files that a command reads."""
    for option in READ:
        value = values.get(option)
        for name in value if isinstance(value, list) else [value]:
            if name and (option != "recipe" or name.endswith(".yaml")) and "://" not in name:
                yield name


def test_each_file_read_by_a_command_was_written_by_an_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written, asked = set(), []
    for title, blocks in sections():
        for block in blocks:
            for line in lines_of(block):
                for program, words in commands_in(line):
                    parsed = parse(Command(PAGE, program, words))
                    asked += [(name, title) for name in named_by(parsed.values)]
                    lacking = [name for name, _ in asked if not Path(name).exists() and name not in written]
                    assert not lacking, f"{title}: nothing wrote {lacking}"
                    written.add(parsed.values.get("output"))
                    if parsed.path == "raycl demo":
                        write_digits(Place("demo"))
                written |= set(re.findall(r"(?: > |^cp \S+ )(\S+)", line))
            if block.language == "python" and "write_bytes" in block.text:
                exec(compile(block.text, title, "exec"), {})
                written.add("images")
            elif block.language == "python":
                texts = [
                    node.value for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Constant)
                ]
                asked += [(text, title) for text in texts if isinstance(text, str)]
    assert {"images/4/100.png", "runs/first", "runs/moco", "mine.yaml"} <= {name for name, _ in asked}


# The full page


class Hour:
    """A folder and a shell, as for a reader of the page."""

    def __init__(self, folder: Path) -> None:
        own = ("RAY_", "RAYCL_", "AWS_")
        outside = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.folder = folder
        self.beside: subprocess.Popen[str] | None = None  # the process in another shell
        self._environment = outside | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command in its own process group, like a shell; write its output to a file."""
        with (self.folder / "printed").open("w") as printed:
            return subprocess.Popen(
                ["bash", "-ec", f"exec {command}"],
                cwd=self.folder, env=self._environment, stdout=printed, stderr=printed, text=True,
                start_new_session=True,
            )  # fmt: skip

    def run(self, command: str) -> None:
        """Run a command to its end."""
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.folder, env=self._environment, capture_output=True, text=True,
            timeout=1_800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def wait_for(self, text: str, process: subprocess.Popen[str], timeout_s: float = 300) -> None:
        """Wait until the started command has printed a text."""
        deadline = time.monotonic() + timeout_s
        while text not in (printed := (self.folder / "printed").read_text()):
            assert process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.2)


@pytest.mark.drill
@pytest.mark.timeout(5_400)
def test_the_commands_of_the_first_hour_work_as_documented(tmp_path: Path) -> None:
    hour = Hour(tmp_path)
    for title, blocks in sections():
        for block in blocks:
            if block.language == "python":
                (tmp_path / "step.py").write_text(block.text)
                hour.run("python step.py")
            for line in lines_of(block):
                if line and not line.startswith(INSTALL) and IN_A_CLUSTER not in line:
                    perform(hour, title, line)
    for name in ("first", "moco", "mine"):
        assert read_result(Place(str(tmp_path / "runs" / name)))["status"] == "finished"
    assert (tmp_path / "runs" / "first" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "comparison.html").exists()


def perform(hour: Hour, title: str, line: str) -> None:
    """Run a line of the page as described there."""
    if title.startswith("5."):
        interrupt(hour, line)
    elif line.startswith("raycl train moco_v2"):
        hour.beside = hour.start(line)
        hour.wait_for("bank: moco", hour.beside)
    elif line.startswith("raycl bank nearest moco"):
        assert hour.beside is not None
        while not has_checkpoint(Place(str(hour.folder / "runs" / "moco"))):
            assert hour.beside.poll() is None, "the run ended before its first checkpoint"
            time.sleep(1)
        hour.run(line)
        if "--image" in line:  # the last query
            assert hour.beside.wait(1_800) == 0
    else:
        hour.run(line)


def has_checkpoint(output: Place) -> bool:
    try:
        return bool(last_checkpoint(output))
    except StorageError:
        return False


def interrupt(hour: Hour, command: str) -> None:
    """Press Ctrl-C during a run as in section 6, and find the output shown there."""
    process = hour.start(command)
    metrics = hour.folder / "runs" / "first" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None, (hour.folder / "printed").read_text()
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    promised = next(line for line in TEXT.splitlines() if line.startswith("raycl: the run was stopped"))
    expected = re.escape(promised).replace(r"step\ 20", r"step\ \d+")
    assert re.search(expected, (hour.folder / "printed").read_text())
