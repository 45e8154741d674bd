"""Write ``docs/reference/conformance.md`` from the rules.

Run ``python -m anytron_conformance.document docs/reference/conformance.md`` after a change; a test
compares the page with the rules.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron_conformance.rules import LEVELS, TITLE, rules_of

if TYPE_CHECKING:
    from anytron_conformance.rules import Level, Rule

_NOTICE = (
    "<!-- Generated from core/anytron_conformance by "
    "python -m anytron_conformance.document docs/reference/conformance.md -->"
)
_INTRODUCTION = f"""# {TITLE}

The rules that `anytron conformance NAME` checks, each with one sentence that says what a platform must do.
[Prove a platform](../how-to/prove-a-platform.md) explains how to run the command. Each rule is checked in cases from
small to large, and the first case that fails is shown. Results of a level mean little while an earlier level fails."""
_LEVELS: dict[Level, str] = {
    "device": "The device runtime, the environment, options and patches. No model, no kernel.",
    "sequences": "Layouts, micro-batches and their scopes, masks, and the conversion of outputs to flat values.",
    "kernels": "Attention, log-probs and every fused kernel against float64, in values and gradients. Company-"
    "invariant kernels against themselves, in other calls.",
    "model": "Tiny models of nine families, compared with transformers, and in several layouts.",
    "training": "Recorded trajectories and sampled steps, compared with the platform `cpu`.",
}


def render() -> str:
    """The whole page, as Markdown."""
    parts = [_NOTICE, "", _INTRODUCTION, ""]
    for level in LEVELS:
        parts += [f"## Level {level}", "", _LEVELS[level], ""]
        for rule in rules_of(level):
            parts += _section(rule)
    return "\n".join(parts).rstrip() + "\n"


def _section(rule: Rule) -> list[str]:
    declined = ", ".join(f"`{feature.value}`" for feature in rule.needs)
    skipped = [f"Skipped, and counted, if the platform does not support {declined}.", ""] if declined else []
    return [f"### {rule.title}", "", f"**{_markdown(rule.contract)}**", "", _markdown(rule.help), "", *skipped]


def _markdown(text: str) -> str:
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
