"""The generated parts of ``docs/reference/families.md``: what each family can do, and the figures."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.device.patches.plan import installed_version
from anytron.sequences.masks import MaskKind
from anytron.task.data.model_files import as_known, logits_fields
from anytron_megatron.checks.model import model_diagnostics
from anytron_megatron.checks.subject import Subject
from anytron_megatron.models.configuration import accepted_masks
from anytron_megatron.models.families import COLUMNS, FAMILIES
from anytron_megatron.options import MegatronOptions
from tests.backends.megatron.families.layouts import EVERY_MODEL

if TYPE_CHECKING:
    from anytron_megatron.models.families import Family
    from tests.backends.megatron.families.observe import Figures

PAGE = Path(__file__).parents[4] / "docs/reference/families.md"
SUPPORT_BEGIN, SUPPORT_END = "<!-- begin of what is supported -->", "<!-- end of what is supported -->"
REFUSED_BEGIN, REFUSED_END = "<!-- begin of what is refused -->", "<!-- end of what is refused -->"
MASKS_BEGIN, MASKS_END = "<!-- begin of masks -->", "<!-- end of masks -->"
BEGIN, END = "<!-- begin of the figures -->", "<!-- end of the figures -->"

_FORMATS = ("thd", "bshd")
_COLUMNS = (
    "family", "layout", "logits, fp32", "logits, bf16 (HF's own)", "gradients, HF", "log-probs", "gradients", "norms",
    "weights", "export", "megatron-core", "date",
)  # fmt: skip
HEADING = (f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|")
Rows = dict[tuple[str, str], str]
"""Lines of the table of figures, by family and layout."""


def measured_rows(measured: dict[tuple[str, str], Figures]) -> Rows:
    """The table's lines of a run, which may have measured some families only."""
    made = [installed_version("megatron-core"), date.today().isoformat()]
    return {
        (model.title, layout.name): _row(
            model.title, layout.name, measured[model.name, layout.name], made, first=layout is model.layouts[0]
        )
        for model in EVERY_MODEL
        for layout in model.layouts
        if (model.name, layout.name) in measured
    }


def _row(title: str, layout: str, figures: Figures, made: list[str], *, first: bool) -> str:
    differences = (figures.log_probs, figures.gradients, figures.grad_norms, figures.weights)
    cells = [
        title,
        layout,
        _number(figures.logits),
        f"{figures.half_logits:.3f} ({figures.half_rounding:.3f})",
        _number(figures.policy_gradients),
        *("" if first else _number(value) for value in differences),
        f"{figures.tensors - len(figures.unequal)} of {figures.tensors}",
        *made,
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def support_rows(measured: Rows) -> list[str]:
    """The table of what each family can do, from ``anytron_megatron.models.families``.

    Args:
        measured: The lines of figures, which say with which megatron-core and when a family was last compared.
    """
    lines = [f"| family | `model_type` | {' | '.join(COLUMNS)} | compared |", "|---" * (len(COLUMNS) + 3) + "|"]
    for family in FAMILIES.values():
        if family.title:
            answers = dict.fromkeys(family.proof, "yes") | dict.fromkeys(family.refused, "refused")
            answered = [answers.get(column, "") for column in COLUMNS]
            cells = [family.title, f"`{family.model_type}`", *answered, _compared(family, measured)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _compared(family: Family, measured: Rows) -> str:
    """With which versions of megatron-core a family's configurations were compared, and when last."""
    titles = {model.title for model in EVERY_MODEL if model.family is family}
    made = [_cells(line)[-2:] for (title, _), line in measured.items() if title in titles]
    versions = sorted({version for version, _ in made})
    return f"{', '.join(versions)}; {max(day for _, day in made)}" if made else ""


def refused_rows() -> list[str]:
    """The families that are refused, with what the checks say of them."""
    lines = ["| family | why | what to do |", "|---|---|---|"]
    for row in FAMILIES.values():
        if set(_FORMATS) <= set(row.refused):
            subject = Subject("model.config", {"model_type": row.model_type}, None)
            refusal = next(iter(model_diagnostics(subject, MegatronOptions())))
            lines.append(f"| {row.title} | {refusal.message} | {refusal.fix} |")
    return lines


def mask_rows() -> list[str]:
    """The table of the masks that each family accepts."""
    lines = ["| family | thd | bshd | bshd, a vendor's modules | bshd, CP |", "|---|---|---|---|---|"]
    for family in FAMILIES.values():
        if not set(_FORMATS) <= set(family.proof):
            continue
        cells = [
            _kinds(_accepted(family, name, ranks, portable=portable))
            for name, ranks, portable in (
                ("thd", 2, True),
                ("bshd", 1, True),
                ("bshd", 1, False),
                ("bshd", 2, True),
            )
        ]
        lines.append(f"| {' | '.join([family.title, *cells])} |")
    return lines


def _accepted(family: Family, sequence_format: str, ranks: int, *, portable: bool) -> frozenset[MaskKind]:
    """What ``BridgeSource.accepted_masks`` says of a model of the family."""
    if family.sparse_attention:
        return frozenset({MaskKind.NONE})
    return accepted_masks(sequence_format, context_parallel=ranks, vision=_sees(family), portable=portable)


def _sees(family: Family) -> bool:
    """Whether a family is built with a vision tower, for images or not."""
    configs = (logits_fields(as_known(model.config)) for model in EVERY_MODEL if model.family is family)
    return any("vision_config" in config for config in configs)


def _kinds(accepted: frozenset[MaskKind]) -> str:
    return ", ".join(f"`{kind.value}`" for kind in MaskKind if kind in accepted)


def write_generated(page: Path) -> None:
    """Put the tables that need no measurement between their marks."""
    text = page.read_text(encoding="utf-8")
    for begin, lines, end in (
        (SUPPORT_BEGIN, support_rows(rows_of(page)), SUPPORT_END),
        (REFUSED_BEGIN, refused_rows(), REFUSED_END),
        (MASKS_BEGIN, mask_rows(), MASKS_END),
    ):
        text = _between(text, begin, lines, end)
    page.write_text(text, encoding="utf-8")


def write_page(page: Path, new: Rows) -> None:
    """Put all tables between their marks: of figures those that are new, and else those that the page has."""
    known = {**rows_of(page), **new}
    places = [(model.title, layout.name) for model in EVERY_MODEL for layout in model.layouts]
    figures = [known[place] for place in places if place in known]
    text = page.read_text(encoding="utf-8")
    page.write_text(_between(text, BEGIN, [*HEADING, *figures], END), encoding="utf-8")
    write_generated(page)


def _between(text: str, begin: str, lines: list[str], end: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, "", *lines, "", end + after])


def rows_of(page: Path) -> Rows:
    """The lines of figures that a page has."""
    _, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    lines = [line for line in rest.partition(END)[0].splitlines() if line.startswith("| ")]
    return {(cells[0], cells[1]): line for line in lines[1:] for cells in [_cells(line)]}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


if __name__ == "__main__":
    write_generated(PAGE)
