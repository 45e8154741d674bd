"""Record which system calls confined processes make, to keep :mod:`anytron.task.isolation.allowed` right.

    python -m tests.core.task.isolation.record COMMAND ...

runs the command under ``strace`` (which must be installed) and counts by name: calls that were made after the filter
was installed, and calls that were refused (``EPERM``, ``ENOSYS``). Calls that a library lacks are among the refused.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LINE = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(?:\(| resumed)(.*)")
_STARTED = re.compile(r"\) += (\d+)$")


def confined(trace: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield calls, and the ends of their lines, of processes with a filter, and of what they have started."""
    inside: set[str] = set()
    for line in trace:
        if (found := _LINE.match(line)) is None or line.endswith("<unfinished ...>"):
            continue
        process, name, rest = found.groups()
        if process in inside:
            yield name, rest
            if name.startswith("clone") and (started := _STARTED.search(rest)):
                inside.add(started[1])
        elif name == "seccomp" and "SET_MODE_FILTER" in rest and rest.endswith("= 0"):
            inside.add(process)


def calls_of(lines: Iterable[tuple[str, str]]) -> tuple[Counter[str], Counter[str]]:
    """Count calls by name: those that were made, and those that were refused."""
    made: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for name, rest in lines:
        (refused if re.search(r"= -1 (EPERM|ENOSYS)\b", rest) else made)[name] += 1
    return made, refused


def main() -> None:
    """Record the command that is given."""
    with tempfile.NamedTemporaryFile() as trace:
        done = subprocess.run(["strace", "-f", "-qq", "-o", trace.name, *sys.argv[1:]], check=False)
        counted = calls_of(confined(Path(trace.name).read_text("utf-8", "replace").splitlines()))
    for title, calls in zip(("made", "refused"), counted, strict=True):
        print(f"{title}:", ", ".join(f"{name} {count}" for name, count in calls.most_common()) or "none")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
