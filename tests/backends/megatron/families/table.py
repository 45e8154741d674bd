"""The generated part of ``docs/reference/families.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.backends.megatron.families.layouts import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.megatron.families.observe import Figures

BEGIN, END = "<!-- begin of the figures -->", "<!-- end of the figures -->"

HEADING = (
    "| family | layout | logits, fp32 | logits, bf16 (HF's own) | log-probs | gradients | norms | weights | export |",
    "|---|---|---|---|---|---|---|---|---|",
)


def rows(measured: dict[tuple[str, str], Figures]) -> list[str]:
    """The table's lines, in the order of ``layouts.py``.

    Raises:
        KeyError: A layout was not measured; the table is of a whole run only.
    """
    return [
        _row(family.title, layout.name, measured[family.name, layout.name], first=layout is family.layouts[0])
        for family in FAMILIES
        for layout in family.layouts
    ]


def _row(title: str, layout: str, figures: Figures, *, first: bool) -> str:
    differences = (figures.log_probs, figures.gradients, figures.grad_norms, figures.weights)
    cells = [
        title,
        layout,
        _number(figures.logits),
        f"{figures.half_logits:.3f} ({figures.half_rounding:.3f})",
        *("" if first else _number(value) for value in differences),
        f"{figures.tensors - len(figures.unequal)} of {figures.tensors}",
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def write_rows(page: Path, lines: list[str]) -> None:
    """Put the table between its marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, "", *HEADING, *lines, "", END + after]), encoding="utf-8")


def rows_of(page: Path) -> list[tuple[str, str]]:
    """Family and layout of each row that a page has."""
    _, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    lines = [line for line in rest.partition(END)[0].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [(cell[0], cell[1]) for cell in cells]
