"""The result of a check: one line, green or red."""

import sys
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The outcome of a check, its finding, and the remedy if it failed."""

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


def passed(name: str, seen: str) -> CheckResult:
    """Return a green result."""
    return CheckResult(good=True, name=name, seen=seen)


def failed(name: str, seen: str, remedy: str = "") -> CheckResult:
    """Return a red result."""
    return CheckResult(good=False, name=name, seen=seen, remedy=remedy)


def passed_if(good: bool, name: str, seen: str, remedy: str) -> CheckResult:
    """Return a green result if ``good``, otherwise a red one with its remedy."""
    return passed(name, seen) if good else failed(name, seen, remedy)
