"""Write the table of keys that may change on ``resume=auto`` into ``docs/how-to/resume-a-run.md``.

Run ``python -m anytron.record.checkpoint.document docs/how-to/resume-a-run.md`` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from anytron.record.checkpoint.differences import CARRIED_OUT, REMEDIES

BEGIN, END = "<!-- keys: written by python -m anytron.record.checkpoint.document -->", "<!-- end of keys -->"


def render() -> str:
    """The table, as Markdown."""
    rows = [f"| `{key}` | {reason} |" for key, reason in {**REMEDIES, **CARRIED_OUT}.items()]
    return "\n".join(["| key, or section | why it may change |", "|---|---|", *rows])


def drawn(page: str) -> str:
    """Put the table into its place on the page."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(drawn(file.read_text(encoding="utf-8")), encoding="utf-8")
