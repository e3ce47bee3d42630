"""A finding: one line, green or red."""

import sys
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One thing looked at: whether it is good, what was seen, and what to do if it is not."""

    good: bool
    name: str
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "✓" if self.good else "✗"
        if sys.stdout.isatty():
            mark = f"\033[{32 if self.good else 31}m{mark}\033[0m"
        seen = " ".join(self.seen.split())
        return f"{mark} {self.name}: {seen}" + (f" -> {self.remedy}" if self.remedy else "")


def size(num_bytes: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes:,.0f} B"
