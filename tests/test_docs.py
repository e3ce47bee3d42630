"""The documents: commands parse, defaults match the recipes, and links and messages exist."""

import ast
import functools
import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import typer
import yaml
from typer.main import get_command

import raycl
from raycl import api, errors, records
from raycl.cli import plan
from raycl.cli.bank import bank
from raycl.cli.main import app
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, override, parse_setting
from raycl.recipes import RECIPES, recipe
from raycl.recipes.like import LIKE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted((ROOT / "raycl").rglob("*.py"))
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_SHELL = ("", "bash", "sh", "console")


class Block(NamedTuple):
    page: str
    language: str
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks() -> list[Block]:
    return [
        Block(name_of(page), found[2], found[3])
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text())
    ]


# Commands


class Command(NamedTuple):
    page: str
    program: str  # raycl, or a script of jobs/
    words: tuple[str, ...]


def commands() -> list[Command]:
    """Return all raycl commands in the shell blocks of all pages."""
    found = []
    for block in blocks():
        if block.language in _SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                found += [Command(block.page, *each) for each in commands_in(line)]
    return found


def commands_in(line: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return  # prose between the fences: a picture of folders, an example of output
    for part in split_at(words, {"&&", "||", ";", "|", "&", ">"}):
        for place, word in enumerate(part):
            before = part[place - 1] if place else ""
            begins = place == 0 or before in ("run", "--", "python", "other") or "=" in before
            if begins and (word == "raycl" or re.fullmatch(r"jobs/\w+\.py", word)):
                yield word, tuple(part[place + 1 :])
                break


def split_at(words: Sequence[str], marks: set[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in marks:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


@functools.cache
def script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"jobs_{Path(path).stem}", ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry_point_of(command: Command) -> Any:
    """Return the typer entry point of a command."""
    if command.program == "raycl":
        return get_command(app)
    stem = Path(command.program).stem
    if stem == "bank":
        return get_command(bank)
    module = script(command.program)
    if hasattr(module, "app"):
        return get_command(module.app)
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    alone = typer.Typer()
    alone.command()(own[0] if own else getattr(module, stem))
    return get_command(alone)


class Parsed(NamedTuple):
    path: str
    values: dict[str, Any]


def parse(command: Command) -> Parsed:
    """Parse a command with the real command line; ``...`` in a document abbreviates earlier arguments."""
    words, is_complete = [word for word in command.words if word != "..."], "..." not in command.words
    entry_point, path = entry_point_of(command), [Path(command.program).stem]
    while inner := getattr(entry_point, "commands", None):
        if not words or words[0].startswith("-"):
            assert set(words) <= {"--help"}, f"{entry_point.name} needs a command"
            return Parsed(" ".join(path), {})
        name = words.pop(0)
        assert name in inner, f"unknown command {name!r}; expected one of {', '.join(inner)}"
        path, entry_point = [*path, name], inner[name]
    if "--help" in words:
        return Parsed(" ".join(path), {})
    context = entry_point.make_context(path[-1], words, resilient_parsing=not is_complete)
    return Parsed(" ".join(path), context.params)


ALL_COMMANDS = commands()


def test_the_documents_show_every_command() -> None:
    shown = {parse(command).path for command in ALL_COMMANDS}
    entry_point: Any = get_command(app)
    existing = {f"raycl {name}" for name in entry_point.commands}
    assert existing - {"raycl bank"} <= shown, f"no page shows {existing - shown}"
    assert len(ALL_COMMANDS) > 100


def test_the_page_of_commands_has_a_row_for_each_command() -> None:
    rows = re.findall(r"^\| `raycl (.+?)` \|", (DOCS / "commands.md").read_text(), re.MULTILINE)
    words = [row.replace("\\|", "|").split() for row in rows]
    entry_point: Any = get_command(app)
    assert {name for name, *_ in words} == set(entry_point.commands)
    parts = {
        name: {part for other, *more in words if other == name for part in more[0].split("|")}
        for name in ("bank", "evaluate")
    }
    assert parts["bank"] == set(entry_point.commands["bank"].commands)
    assert parts["evaluate"] == set(get_args(api.Measure))


@pytest.mark.parametrize(
    "command", ALL_COMMANDS, ids=lambda each: f"{each.page}: {' '.join(each.words)[:60]}"
)
def test_each_command_in_the_documents_is_valid(command: Command) -> None:
    parsed = parse(command)
    settings = parsed.values.get("settings") or []
    asked, known = parsed.values.get("recipe") or parsed.values.get("like"), {*RECIPES, *LIKE}
    if asked is not None:
        for name in [asked] if asked in known else ["moco_v2", "simclr"] if asked.isupper() else []:
            check_run(recipe(name, image_size=64), parsed.values, settings)
        assert asked in known or asked.isupper() or asked.endswith((".yaml", ".yml")), f"no recipe {asked}"
    elif settings:
        name = parsed.values["measure"] if "evaluate" in parsed.path else parsed.path.split()[-1]
        plan.command_settings(name, settings)
    if parsed.path == "reproduce":
        assert parsed.values["name"] in {*script("jobs/reproduce.py").FIGURES, "FIGURE"}
    if parsed.path == "raycl recipes" and parsed.values["name"] is not None:
        assert parsed.values["name"] in {*known, "NAME"}


def check_run(plain: RunConfig, values: dict[str, Any], settings: Sequence[str]) -> None:
    """Build the run as ``raycl train`` would, from flags and settings together."""
    given: dict[str, Any] = {}
    if values.get("batch_size"):
        given["stages.0.batch_size"] = values["batch_size"]
    if values.get("epochs") or values.get("steps"):
        given |= {f"stages.0.{name}": values[name] for name in ("epochs", "steps")}
    if workers := values.get("workers"):
        least, _, most = workers.partition(":")
        given |= {"workers": int(most or least), "min_workers": int(least) if most else None}
    override(plain, given | dict(map(parse_setting, settings)))


def test_settings_named_in_inline_code_exist() -> None:
    flat = {
        re.sub(r"\.\d+\.", ".N.", path)
        for name in RECIPES
        for path in settings_of(recipe(name, image_size=64).model_dump())
    }
    sections = {path.rpartition(".")[0] for path in flat}
    heads = {path.split(".")[0] for path in flat if "." in path}
    for page in PAGES:
        if page.name.startswith("migration-"):
            continue  # half of the names here belong to other libraries
        for named in re.findall(r"`(?:--set )?([a-z_]+(?:\.[a-z_0-9N]+)+)(?:=[^`]*)?`", page.read_text()):
            path = re.sub(r"\.(\d+|N)\.", ".N.", named)
            is_file = path.endswith((".json", ".safetensors", ".py", ".md", ".yaml"))
            if path.split(".")[0] not in heads or is_file or ".kwargs" in path:
                continue  # a file, a module, or free-form arguments
            assert path in flat | sections, f"{name_of(page)} names the unknown setting {named}"


def settings_of(values: Any, path: str = "") -> Iterator[str]:
    items = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, tuple) else ()
    )
    nested = [(key, value) for key, value in items if not isinstance(value, float | int | str)]
    yield from (f"{path}{key}" for key, _ in items) if isinstance(values, dict) else ()
    for key, value in nested:
        yield from settings_of(value, f"{path}{key}.")


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.language == "yaml"], ids=lambda block: block.page
)
def test_each_yaml_block_is_a_valid_run(block: Block) -> None:
    values = yaml.safe_load(block.text)
    if "stages" in values:
        config_from_yaml(yaml.safe_dump({"recipe": "shown"} | values))


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.language == "python"], ids=lambda block: block.page
)
def test_each_python_block_parses_and_uses_existing_names(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raycl"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raycl":
            assert node.attr in raycl.__all__ or importlib.util.find_spec(f"raycl.{node.attr}"), node.attr


# Links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_linked_files_and_pictures_exist(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path = target.partition("#")[0]
            assert not path or (page.parent / path).exists(), f"{name_of(page)} leads to {target}"


def test_the_figures_of_the_readme_are_on_the_pages_of_results() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Results")[2].partition("\n## ")[0]
    figures = set(re.findall(r"\d[\d,]*(?:\.\d+| s\b| minutes)", re.sub(r"\]\([^)]*\)", "", section)))
    assert len(figures) > 15
    pages = "".join((DOCS / f"{name}.md").read_text() for name in ("results", "performance"))
    assert not {
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", pages)
    }


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/-]+\.md)", text))
    assert {str(page.relative_to(DOCS)) for page in PAGES[1:]} <= listed


def test_the_code_map_lists_exactly_the_existing_modules() -> None:
    text = (ROOT / "raycl" / "README.md").read_text()
    named = set(re.findall(r"(?<![\w/.])(\w+(?:/\w+)*(?:/|\.py))(?!\w)", text))
    outside = {"tests/test_floors.py"}
    lacking = {path for path in named - outside if not (ROOT / "raycl" / path).exists()}
    assert not lacking, f"raycl has no {lacking}"
    parts = {f"{path.name}/" for path in (ROOT / "raycl").iterdir() if (path / "__init__.py").exists()}
    parts |= {path.name for path in (ROOT / "raycl").glob("*.py") if not path.name.startswith("__")}
    assert parts <= named, f"the map lacks {parts - named}"


# Recipes

_CELL = re.compile(r"^\| `([^`]+)` \|(.*)\|$", re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_page_states_the_actual_defaults(name: str) -> None:
    text = (DOCS / "recipes" / f"{name}.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    header = next(line for line in text.splitlines() if line.startswith("| setting"))
    sizes = [size_of(column) for column in header.strip("| ").split("|")[1:] if column.strip()]
    rows = _CELL.findall(text)
    assert len(rows) >= 10
    for path, cells in rows:
        for size, cell in zip(sizes, cells.split("|"), strict=False):
            said = yaml.safe_load(cell.strip().strip("`"))
            has = value_at(recipe(name, image_size=size).model_dump(mode="json"), path)
            same = float(said) == has if isinstance(has, float) else said == has
            assert same, f"{name}.md says {path} is {said}, of images of {size} pixels it is {has}"


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_page_has_a_column_for_each_image_size_with_other_defaults(name: str) -> None:
    text = (DOCS / "recipes" / f"{name}.md").read_text()
    paths = [path for path, _ in _CELL.findall(text.partition("## Settings")[2].partition("\n## ")[0])]
    large, small = (recipe(name, image_size=size).model_dump(mode="json") for size in (224, 32))
    differs = any(value_at(large, path) != value_at(small, path) for path in paths)
    assert differs == ("up to" in text.partition("## Settings")[2].partition("\n")[2].split("|---")[0])


def size_of(column: str) -> int:
    """Return an image size that a column applies to."""
    above, up_to = re.search(r"above (\d+) pixels", column), re.search(r"up to (\d+) pixels", column)
    return int(above[1]) + 1 if above else int(up_to[1]) if up_to else 224


def value_at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values


def test_every_recipe_is_in_the_list_of_recipes() -> None:
    linked = re.findall(r"^\| \[(\w+)\]\(\1\.md\)", (DOCS / "recipes" / "index.md").read_text(), re.MULTILINE)
    assert set(linked) == set(RECIPES)


def test_the_columns_of_every_recipe_are_in_the_page_about_data() -> None:
    section = (DOCS / "guides" / "data.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(RECIPES)


# Troubleshooting

TROUBLE = (DOCS / "troubleshooting.md").read_text()


@functools.cache
def templates() -> list[str]:
    """Return all strings in raycl's source, with a gap for each inserted value."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def lines_of_output() -> list[str]:
    """Return quoted output of raycl: lines of text blocks and of the table of refusals."""
    quoted = [
        line for found in _BLOCK.finditer(TROUBLE) if found[2] == "text" for line in found[3].splitlines()
    ]
    refusals = TROUBLE.partition("## Refused settings")[2].partition("\n## ")[0]
    return quoted + re.findall(r"^\| `([^`]+)` \|", refusals, re.MULTILINE)


@pytest.mark.parametrize("line", lines_of_output())
def test_each_line_quoted_in_troubleshooting_is_printed_by_raycl(line: str) -> None:
    pieces = [piece.strip(" :;,()") for piece in line.split("...")]
    telling = [piece for piece in pieces if len(piece) >= 4]
    assert telling, "the line has only gaps"
    # A message inserted into another one counts as two.
    assert num_messages(telling) <= 2, f"raycl prints no message like {line!r}"


def num_messages(pieces: Sequence[str]) -> float:
    """Return the smallest number of messages that contain these pieces in order; infinite if none do."""
    if not pieces:
        return 0
    for length in range(len(pieces), 0, -1):
        pattern = re.compile(".*".join(map(re.escape, pieces[:length])), re.DOTALL)
        if any(pattern.search(template) for template in templates()):
            return 1 + num_messages(pieces[length:])
    return math.inf


def test_names_in_troubleshooting_exist() -> None:
    prose = _BLOCK.sub("", TROUBLE)
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", prose))
    assert len(named) > 10
    known = {word for template in templates() for word in re.findall(r"\w+", template)}
    fields = {word for path in SOURCES for word in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", path.read_text())}
    assert named <= known | fields, named - known - fields
    for name in set(re.findall(r"\b([A-Z]\w+Error)\b", TROUBLE)):
        assert issubclass(getattr(errors, name), errors.RayclError)


# Quoted words in symptoms other than metrics.
_NO_METRICS = {"nt_xent", "max_failures", "autoscaling", "event", "collapse", "rollback"}


def documented_metrics() -> set[str]:
    """Return the metrics in the table of the page about steps."""
    section = (DOCS / "concepts" / "step.md").read_text().partition("## Logged metrics")[2]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_each_metric_of_a_symptom_is_documented() -> None:
    symptoms = re.findall(r"^\*\*Symptom\.\*\*(.*?)(?:\n\n|\Z)", TROUBLE, re.MULTILINE | re.DOTALL)
    named = {name for symptom in symptoms for name in re.findall(r"`([a-z]\w+)`", symptom)} - _NO_METRICS
    assert len(named) >= 10
    assert named <= documented_metrics(), named - documented_metrics()


def test_events_named_in_symptoms_exist() -> None:
    assert set(re.findall(r"`event` line `(\w+)`", TROUBLE)) == {"collapse", records.ROLLBACK}


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Unreachable proxies, so that any download fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    nowhere["NO_MKDOCS_2_WARNING"] = "1"  # suppresses an announcement that would hide errors
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True, check=False, timeout=300
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Loads(HTMLParser):
    """Collect the resources that a browser loads automatically."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.addresses += [given[name] for name in ("src", "srcset", "poster", "data") if name in given]
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.addresses.append(given.get("href", ""))
        self.addresses += re.findall(r"url\(([^)]+)\)", given.get("style", ""))


def test_no_page_loads_resources_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert any(address.endswith(".css") for address in loads.addresses), page
        away = [address for address in loads.addresses if re.match(r"\s*['\"]?([a-z]+:)?//", address)]
        assert not away, f"{page.name} loads {away}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert not re.search(r"@import|url\(\s*['\"]?([a-z]+:)?//", text), f"{sheet} loads from another host"


def test_site_has_the_changelog_and_the_docstrings(site: Path) -> None:
    assert "Keep a Changelog" in (site / "changelog.html").read_text()
    for page, name in {
        "api/index.html": "raycl.api.train",
        "api/config.html": "raycl.config.RunConfig",
        "api/bank.html": "raycl.negatives.bank.Bank.nearest",
        "api/losses.html": "raycl.losses.nt_xent",
        "api/errors.html": "raycl.errors.CollapseError",
    }.items():
        assert f'id="{name}"' in (site / page).read_text()


def test_the_concept_pictures_match_the_output_of_their_script() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "concept_pictures.py").read_text())
    drawn = next(
        {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    files = list((DOCS / "images" / "concepts").iterdir())
    assert {file.stem for file in files} == drawn
    assert all(file.stat().st_size < 100_000 for file in files)
    text = "".join(page.read_text() for page in PAGES)
    assert all(f"images/concepts/{file.name}" in text for file in files)
