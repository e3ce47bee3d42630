"""The check of the storage: every node and this machine exchange small files next to the output of a run."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from raycl.doctor.nodes import TIMEOUT_S, Node, ask_nodes
from raycl.doctor.result import CheckResult, failed, passed
from raycl.errors import RayclError, StorageError
from raycl.lease import check_is_kept
from raycl.records import CONFIG
from raycl.storage import Place, absolute

HERE = "this machine"
_TIMEOUT_S = 2 * TIMEOUT_S + 120.0  # requests to S3 are retried for 102 s
_MAX_PROBLEMS = 4  # problems that a result lists
_FIX_PERMISSION = "let every node and this machine write, read and delete there"
_FIX_SHARING = "give a folder that all nodes share (NFS, FSx, a volume of many writers), or s3://"


def check_storage(output: str, nodes: Sequence[Node]) -> CheckResult:
    """Write a small file next to ``output`` from every node and here, read them, and delete them."""
    try:
        place = Place(absolute(output))
        check_is_kept(place)
        if place.exists() and not place.is_folder():
            return failed("storage", f"{place} is a file", "give a folder, or a new address")
        has_run = (place / CONFIG).exists()
        folder = _folder_of(place)
        problems, remedy = exchange_files(_nearest_existing(folder), nodes)
    except RayclError as error:
        return failed("storage", str(error))
    if problems:
        num_more = len(problems) - _MAX_PROBLEMS
        listed = "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {num_more} more" if num_more > 0 else "")
        return failed("storage", f"{folder}: {listed}", remedy)
    where = HERE if len(nodes) == 1 else f"{len(nodes)} nodes and {HERE}"
    seen = f"{folder}: written, read and deleted from {where}"
    if has_run:
        seen += f"; {output} holds an earlier run, so raycl train needs --resume or another --output"
    return passed("storage", seen)


def _folder_of(place: Place) -> Place:
    """Return the folder or prefix that an output lies in; a bucket is its own."""
    try:
        return place.parent
    except StorageError:
        return place


def _nearest_existing(folder: Place) -> Place:
    """Return the folder, or its nearest parent that exists, so that the check creates no folders."""
    if not folder.is_local:
        return folder
    path = Path(folder.root)
    return Place(str(next(each for each in (path, *path.parents) if each.exists())))


def exchange_files(folder: Place, nodes: Sequence[Node]) -> tuple[list[str], str]:
    """Write a file per node and one here; each node reads the one written here, which reads all of them.

    Returns the problems, if any, and their remedy. All files are deleted.
    """
    prefix = f".raycl-doctor-{uuid.uuid4().hex}"
    own_file = {f"{prefix}-here": HERE}
    node_files = {f"{prefix}-{node.node_id}": node.name for node in nodes}
    try:
        answers = ask_nodes(nodes, write_own_file, folder, prefix, timeout_s=_TIMEOUT_S)
        problems = [(answer.node.name, answer.problem or answer.value) for answer in answers]
        problems.append((HERE, write_file(folder, f"{prefix}-here")))
        if found := [f"{name}: {problem}" for name, problem in problems if problem]:
            return found, _FIX_PERMISSION
        found = []
        for answer in ask_nodes(nodes, read_files, folder, own_file, timeout_s=_TIMEOUT_S):
            if answer.problem:
                found.append(f"{answer.node.name}: {answer.problem}")
            found += [f"{answer.node.name} {problem}" for problem in answer.value or ()]
        found += [f"{HERE} {problem}" for problem in read_files(folder, node_files)]
        if found:
            return found, _FIX_SHARING if folder.is_local else _FIX_PERMISSION
    finally:
        answers = ask_nodes(nodes, delete_own_file, folder, prefix, timeout_s=_TIMEOUT_S)
        # On shared storage this also deletes the files of nodes that did not answer.
        left = [delete_file(folder, file) for file in (*own_file, *node_files)]
    leftovers = [(answer.node.name, answer.problem or answer.value) for answer in answers]
    leftovers += [(HERE, problem) for problem in left]
    return [f"{name}: {problem}" for name, problem in leftovers if problem], _FIX_PERMISSION


def write_own_file(folder: Place, prefix: str) -> str:
    """Write the file of the node that this task runs on; return the error, if any."""
    return write_file(folder, f"{prefix}-{ray.get_runtime_context().get_node_id()}")


def delete_own_file(folder: Place, prefix: str) -> str:
    """Delete the file of the node that this task runs on; return the error, if any."""
    return delete_file(folder, f"{prefix}-{ray.get_runtime_context().get_node_id()}")


def write_file(folder: Place, file: str) -> str:
    """Write a small file that contains its own name; return the error, if any.

    Writes nothing to a local folder that is missing on this node: the other machines will miss the file.
    """
    try:
        if not folder.is_local or folder.exists():
            (folder / file).write_bytes(file.encode())
    except RayclError as error:
        return str(error)
    return ""


def read_files(folder: Place, files: Mapping[str, str]) -> list[str]:
    """Return the problem of each file that is missing or differs from the one written, given its owner."""
    problems = []
    for file, owner in files.items():
        try:
            if not (folder / file).exists():
                problems.append(f"does not see the file of {owner}")
            elif (folder / file).read_bytes() != file.encode():
                problems.append(f"sees other bytes in the file of {owner}")
        except RayclError as error:
            problems.append(f"{error}: the file of {owner}")
    return problems


def delete_file(folder: Place, file: str) -> str:
    """Delete a file if it exists; return the error, if any."""
    try:
        (folder / file).delete()
    except RayclError as error:
        return str(error)
    return ""
