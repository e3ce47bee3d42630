"""Installation: the commands of each page need only the packages that it installs."""

import re
import shlex
import tomllib
from collections.abc import Iterable

from tests.test_docs import PAGES, ROOT, blocks, name_of, split_at

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAMS = ("ray", "raycl")


def commands_of(page: str) -> set[tuple[str, ...]]:
    """Return the ray and raycl commands in shell blocks of a page and in tables of commands."""
    text = [block.text for block in blocks() if block.page == page and block.language in ("bash", "sh")]
    lines = [line for each in text for line in each.replace("\\\n", " ").splitlines()]
    if page in ("README.md", "docs/commands.md"):
        lines += re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    parts = [
        part for line in lines for part in split_at(shlex.split(line, comments=True), {"&&", "|", "&", ">"})
    ]
    return {tuple(part[part.index(program) :]) for part in parts for program in PROGRAMS if program in part}


def needed_by(command: tuple[str, ...]) -> set[str]:
    """Return the Ray extras that a command needs; Ray's own commands need the dashboard."""
    if command[0] == "ray":
        return {"default"}
    return {"data", "train"} | ({"serve"} if command[1:3] == ("bank", "serve") else set())


def extras_of(package: str, texts: Iterable[str]) -> set[str]:
    """Return the extras of a package in these texts."""
    found = [each for text in texts for each in re.findall(rf"\b{package}\[([\w,]+)\]", text)]
    return {extra for each in found for extra in each.split(",")}


def test_the_commands_of_a_page_need_only_the_packages_it_installs() -> None:
    seen = set()
    for page in map(name_of, PAGES):
        extras = extras_of("raycl", [(ROOT / page).read_text()])
        requirements = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][each] for each in extras)]
        installed = extras_of("ray", [each for part in requirements for each in part])
        for command in commands_of(page):
            seen.add(command[:2])
            lacking = needed_by(command) - installed
            assert not lacking, f"{page}: {' '.join(command)} needs ray[{','.join(lacking)}]"
    assert {("ray", "job"), ("ray", "start"), ("raycl", "train"), ("raycl", "bank")} <= seen
