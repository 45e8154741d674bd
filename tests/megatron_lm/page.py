"""The page of the results: ``python -m tests.megatron_lm.page``."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.house import ROOT
from tests.megatron_lm.outcomes import KINDS, MEANINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

RESULTS = ROOT / "docs" / "reference" / "results"
PAGE = ROOT / "docs" / "reference" / "megatron-suite.md"
INTRODUCTION = """# Megatron-LM's own unit tests

Megatron-LM's repository has unit tests of megatron-core, written for NVIDIA GPUs. Here they run, unedited, on Anytron's
device stack, on a machine without an accelerator. Without the device stack only tests of pure Python pass there. Each
failure has a class, by its message; `tests/megatron_lm/outcomes.py` has the rules. A failure without a class counts as
a gap of Anytron's. Gaps and crashes are listed.

<!-- needs: a checkout of Megatron-LM -->
```sh
git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM ../Megatron-LM
ANYTRON_MEGATRON_LM=../Megatron-LM tox -e megatron-suite
```

Many of the tests need eight ranks; on one rank they fail, in the class `ranks`. For the tests alone,
`torch.cuda.is_available()` is True in test files (seventy marks would skip their tests otherwise), flash_attn has a
version and no function, nothing is downloaded from Hugging Face, and megatron-core's extension is not compiled again.

With `-- --ranks 8` the command runs the tests of the folders `tensor_parallel`, `pipeline_parallel`, `distributed` and
`transformer` in eight processes, file by file. Tests that hang are run once more in new processes. With
two cores and 24 GiB, as below, tests with large models lack memory; a rank that fails leaves the others waiting, and
they count as crashed or lost.
"""


def results() -> list[dict[str, Any]]:
    """Return the stored results, by platform and ranks."""
    stored = (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("megatron-suite-*.json"))
    return sorted(stored, key=lambda found: (found["platform"], found["ranks"]))


def table(found: Mapping[str, Any]) -> str:
    """Return the counts by folder and outcome, and the failures by class, as Markdown."""
    total: Counter[str] = Counter()
    rows = []
    for name, counts in found["folders"].items():
        total.update(counts)
        rows.append(_row(name, counts))
    lines = [
        f"| folder | {' | '.join(KINDS)} |",
        "|---|" + "---:|" * len(KINDS),
        *rows,
        _row("**all**", total),
        "",
        "| failures | class |",
        "|---:|---|",
        *(f"| {count} | {name}: {MEANINGS[name]} |" for name, count in found["classes"].items()),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, counts: Mapping[str, int]) -> str:
    return f"| {name} | " + " | ".join(str(counts.get(kind, 0)) for kind in KINDS) + " |"


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for found in results():
        ranks = "1 rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"
        parts.append(
            f"## Platform {found['platform']}, {ranks}\n\n"
            f"megatron-core {found['megatron-core']}, measured on {found['date']}.\n\n{table(found)}"
        )
        if found["gaps"]:
            gaps = "".join(f"- `{test}`: {message.splitlines()[0]}\n" for test, message in found["gaps"].items())
            parts.append(f"Gaps and crashes:\n\n{gaps}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
