"""Which run of a server's is this one: kept in the output, so that a resumed run goes on with it."""

import json

from raycl.storage import Place


def known_run(output: Place, name: str, server: str) -> str | None:
    """Return the id that a tracker remembered below ``output``, None if there is none of this server."""
    place = output / f"{name}.json"
    known = json.loads(place.read_text()) if place.exists() else {}
    return known.get("run") if known.get("server") == server else None


def remember_run(output: Place, name: str, server: str, run: str) -> None:
    """Keep the id of a run for ``known_run``; raises ``StorageError``."""
    (output / f"{name}.json").write_text(json.dumps({"server": server, "run": run}) + "\n")
