"""Write the tables of ``docs/explanation/silent-faults.md``: ``python -m tests.corpus.page``."""

from __future__ import annotations

from tests.corpus import rivals
from tests.corpus.catalog import every_fault
from tests.corpus.test_published import published
from tests.house import ROOT

PAGE = ROOT / "docs" / "explanation" / "silent-faults.md"
HEADINGS = {
    "device": "In what a device, a bridge or a layout does",
    "rollout": "In rollouts and in what is sent to them",
    "loss": "In losses, advantages and data",
}


def table() -> str:
    """Return the faults by district and kind, each with the rule that catches it."""
    rules = {fault.entry(): fault.rule for fault in every_fault()}
    lines = []
    for district, entries in published().items():
        lines += ["", f"### {HEADINGS[district]}", "", "| kind | fault | what was wrong | how it showed | caught by |"]
        lines += ["|---|---|---|---|---|"]
        for one in entries:
            name = f"[{one['name']}]({one['link']}), {one['date']}"
            rule = f"`{rules[one['name']]}`" if one["name"] in rules else ""
            lines.append(f"| {one['kind']} | {name} | {one['what']} | {one['shows']} | {rule} |")
    return "\n".join(lines) + "\n\n"


def with_tables(text: str) -> str:
    """Return the page's text with the present tables."""
    for name, made in (("faults", table()), ("rivals", rivals.table())):
        begin, end = f"<!-- begin of {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + made + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
