"""The storage of a run: whether every node writes, reads and deletes there, and all of them see one place."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, final

from raycl.doctor.files import Written, delete, parent_of, read, remove_folders, write
from raycl.doctor.nodes import PATIENCE_S, Answer, Node, ask
from raycl.doctor.result import CheckResult
from raycl.errors import RayclError
from raycl.storage import Place, absolute

HERE = "this machine"
_PATIENCE_S = 2 * PATIENCE_S + 120.0  # S3 is asked for 102 s before it is given up
_ALLOW = "let every node and this machine write, read and delete there"
_SHARE = "give a folder that all nodes share (NFS, FSx, a volume of many writers), or s3://"
_NAMED = 4  # of what went wrong, so many are told


def examine_storage(output: str, nodes: Sequence[Node]) -> CheckResult:
    """Write a small file from everywhere beside ``output``, read others' there, and delete them all."""
    try:
        place = Place(absolute(output))
        folder = parent_of(place)
        exists = place.exists()
        visit = Visit(folder, nodes)
        try:
            problems, remedy = visit.problems()
        finally:
            undone = visit.clean()
    except RayclError as error:
        return CheckResult(good=False, name="storage", seen=str(error))
    if problems or undone:
        seen = f"{folder}: {_listed(problems or undone)}"
        return CheckResult(good=False, name="storage", seen=seen, remedy=remedy if problems else _ALLOW)
    where = "this machine" if len(nodes) == 1 else f"{len(nodes)} nodes and this machine"
    seen = f"{folder}: written, read and deleted from {where}"
    if exists:
        seen += f"; {output} exists already, so raycl train needs --resume or another --output"
    return CheckResult(good=True, name="storage", seen=seen)


@final
class Visit:
    """One file from each node and one from here: all write, all read, all delete."""

    def __init__(self, folder: Place, nodes: Sequence[Node]) -> None:
        self._folder, self._nodes = folder, nodes
        stem = f".raycl-doctor-{uuid.uuid4().hex}"
        self._own = f"{stem}-here"
        self._files = {node.node_id: f"{stem}-{number}" for number, node in enumerate(nodes)}
        self._whose = {self._own: HERE} | {self._files[node.node_id]: node.name for node in nodes}
        self._made: dict[str, Sequence[str]] = {}
        self._made_here: Sequence[str] = ()

    def problems(self) -> tuple[list[str], str]:
        """Write, then read; return what went wrong with the first of the two that failed, and what to do."""
        if problems := self._write():
            return problems, _ALLOW
        return self._read(), _SHARE if self._folder.is_local else _ALLOW

    def clean(self) -> list[str]:
        """Delete all files and the folders made for them; return what went wrong."""
        answers = self._ask(delete, {node: (file,) for node, file in self._files.items()})
        problems = [f"{each.node.name}: {said}" for each in answers if (said := each.problem or each.value)]
        if here := delete(self._folder, self._own):
            problems.append(f"{HERE}: {here}")
        # Of a node that has not answered the file may be here, if the place is one.
        for file in self._files.values():
            delete(self._folder, file)
        # Folders last, when no one's file is in them.
        makers = [node for node in self._nodes if self._made.get(node.node_id)]
        ask(makers, remove_folders, of_each={node: (made,) for node, made in self._made.items()})
        remove_folders(self._made_here)
        return problems

    def _write(self) -> list[str]:
        # The nodes first: a folder that was made here would hide that they have none.
        answers: list[Answer[Written]] = self._ask(
            write, {node: (file,) for node, file in self._files.items()}
        )
        self._made = {each.node.node_id: each.value.made for each in answers if each.value is not None}
        here = write(self._folder, self._own)
        self._made_here = here.made
        told = {each.node.name: each.problem or (each.value or Written()).problem for each in answers}
        return [f"{who}: {problem}" for who, problem in (told | {HERE: here.problem}).items() if problem]

    def _read(self) -> list[str]:
        nodes = list(self._files)
        neighbors = dict(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))
        answers = self._ask(read, {node: ((self._own, self._files[neighbors[node]]),) for node in nodes})
        silent = [f"{each.node.name}: {each.problem}" for each in answers if not each.came]
        missed = {each.node.name: each.value for each in answers if each.value}
        missed[HERE] = read(self._folder, list(self._files.values()))
        return silent + [
            f"{who} {what} the file of {self._whose[file]}"
            for who, problems in missed.items()
            for file, what in problems.items()
        ]

    def _ask(self, question: Any, of_each: Mapping[str, Sequence[Any]]) -> list[Answer[Any]]:
        return ask(self._nodes, question, self._folder, of_each=of_each, timeout_s=_PATIENCE_S)


def _listed(problems: Sequence[str]) -> str:
    more = len(problems) - _NAMED
    return "; ".join(problems[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
