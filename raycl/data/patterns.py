"""Addresses with braces, as WebDataset's users write them: ``shard-{000..127}.tar``, ``{a,b}.parquet``."""

import re
from urllib.parse import unquote

from raycl.errors import DataError

MAX_FILES = 100_000
_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
FORMS = "{000..127} for a range of numbers or {a,b} for a list"


def is_pattern(uri: str) -> bool:
    """Whether an address has a range or a list in braces; other braces belong to a name."""
    return any("," in group or ".." in group for group in _GROUP.findall(uri))


def folder_of(uri: str) -> str:
    """Return the folder of all files of a pattern, and any other address unchanged."""
    if not is_pattern(uri):
        return uri
    folder, _, options = _split(uri)
    return folder + options


def expand(uri: str) -> list[str]:
    """Return the names of a pattern's files in their folder, sorted and each once.

    Raises ``DataError`` for braces without a counterpart, for other contents than a range or a list, and for too many files.
    """
    names = set[str]()
    waiting = [_split(uri)[1]]
    while waiting:
        name = waiting.pop()
        group = _GROUP.search(name)  # the innermost braces first
        if group is not None:
            waiting += [
                name[: group.start()] + each + name[group.end() :] for each in _choices(group[1], uri)
            ]
        elif "{" in name or "}" in name:
            raise DataError(f"the pattern {uri} has a brace without its counterpart; write {FORMS}")
        else:
            names.add(unquote(name) if "://" in uri else name)
        if len(names) + len(waiting) > MAX_FILES:
            raise DataError(
                f"the pattern {uri} has more than {MAX_FILES:,} files; give the folder of the files"
            )
    return sorted(names)


def _choices(text: str, uri: str) -> list[str]:
    """Return the choices between two braces: a range of numbers with leading zeros, or a list."""
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + MAX_FILES:
            raise DataError(
                f"the pattern {uri} counts from {first} to {last}; count upward, at most {MAX_FILES:,} files"
            )
        return [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    if "," not in text:
        raise DataError(f"the pattern {uri} has {{{text}}}, neither a range nor a list; write {FORMS}")
    return text.split(",")


def _split(uri: str) -> tuple[str, str, str]:
    """Return the folder before the first brace, the rest, and the options after a ``?``."""
    address, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    folder = address.partition("{")[0].rpartition("/")[0]
    if "://" in address and folder.count("/") < 2:
        raise DataError(
            f"the pattern {uri} has braces in the name of its bucket; give each bucket by its own --data"
        )
    return folder or "/", address[len(folder) + 1 :], mark + options
