"""The generated parts of ``docs/reference/families.md``: what each family can do, and the figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anytron.sequences.masks import MaskKind
from anytron_megatron.models.configuration import accepted_masks
from anytron_megatron.models.families import COLUMNS, FAMILIES
from tests.backends.megatron.families.layouts import MODELS

if TYPE_CHECKING:
    from tests.backends.megatron.families.observe import Figures

PAGE = Path(__file__).parents[4] / "docs/reference/families.md"
SUPPORT_BEGIN, SUPPORT_END = "<!-- begin of what is supported -->", "<!-- end of what is supported -->"
MASKS_BEGIN, MASKS_END = "<!-- begin of masks -->", "<!-- end of masks -->"
BEGIN, END = "<!-- begin of the figures -->", "<!-- end of the figures -->"

_FORMATS = ("thd", "bshd")
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
        _row(model.title, layout.name, measured[model.name, layout.name], first=layout is model.layouts[0])
        for model in MODELS
        for layout in model.layouts
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


def support_rows() -> list[str]:
    """The table of what each family can do, from ``anytron_megatron.models.families``."""
    lines = [f"| family | `model_type` | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for family in FAMILIES.values():
        if family.title:
            answers = dict.fromkeys(family.proof, "yes") | dict.fromkeys(family.refused, "refused")
            cells = [family.title, f"`{family.model_type}`", *(answers.get(column, "") for column in COLUMNS)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def mask_rows() -> list[str]:
    """The table of the masks that each family accepts."""
    lines = ["| family | thd | bshd | bshd, a vendor's modules | bshd, CP |", "|---|---|---|---|---|"]
    for family in FAMILIES.values():
        if not set(_FORMATS) <= set(family.proof):
            continue
        cells = [
            _kinds(accepted_masks(name, context_parallel=ranks, vision=family.takes_images, portable=portable))
            for name, ranks, portable in (
                ("thd", 2, True),
                ("bshd", 1, True),
                ("bshd", 1, False),
                ("bshd", 2, True),
            )
        ]
        lines.append(f"| {' | '.join([family.title, *cells])} |")
    return lines


def _kinds(accepted: frozenset[MaskKind]) -> str:
    return ", ".join(f"`{kind.value}`" for kind in MaskKind if kind in accepted)


def write_generated(page: Path) -> None:
    """Put the tables that need no measurement between their marks."""
    text = _between(page.read_text(encoding="utf-8"), SUPPORT_BEGIN, support_rows(), SUPPORT_END)
    page.write_text(_between(text, MASKS_BEGIN, mask_rows(), MASKS_END), encoding="utf-8")


def write_page(page: Path, figures: list[str]) -> None:
    """Put all tables between their marks."""
    write_generated(page)
    text = page.read_text(encoding="utf-8")
    page.write_text(_between(text, BEGIN, [*HEADING, *figures], END), encoding="utf-8")


def _between(text: str, begin: str, lines: list[str], end: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, "", *lines, "", end + after])


def rows_of(page: Path) -> list[tuple[str, str]]:
    """Family and layout of each row of figures that a page has."""
    _, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    lines = [line for line in rest.partition(END)[0].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [(cell[0], cell[1]) for cell in cells]


if __name__ == "__main__":
    write_generated(PAGE)
