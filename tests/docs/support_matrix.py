"""Write ``docs/reference/support-matrix.md``: what was measured of which family on which platform in which layout.

``python -m tests.docs.support_matrix docs/reference/support-matrix.md`` writes the page from the files in
``docs/reference/results``; ``python -m tests.docs.measure`` makes those. What is measured is said here: the cases of
the conformance kit, and tests. A test of this page requires those in the files to be those of the code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from anytron_conformance.rules import rules_of
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.models.families import FAMILIES
from tests.backends.megatron.families.layouts import MODELS
from tests.docs.results import NOT_RUN, measured, of_case, of_test, worst

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.docs.results import Measured

HEADING = """# Support matrix

<!-- Generated from docs/reference/results, tests/docs/support_matrix.py and tests/backends/megatron/families/layouts.py
by `python -m tests.docs.support_matrix docs/reference/support-matrix.md`. -->

Which family computes right on which platform in which layout, as it was measured: every cell is a result in one of
the files (`docs/reference/results`) that stand under the platform, with the day and the versions.

- **kit**: `anytron conformance` passed. It computes with a tiny model: logits, log-probs and the gradient of every
  parameter on one rank are those of transformers; other layouts give what one rank gives.
- **test**: the test under the table passed. It trains a tiny model on recorded trajectories, through real Megatron, and
  compares log-probs, gradient norms and weights with another platform, or with Hugging Face and every other layout
  ([figures](families.md)).
- **kit fails**, **test fails**: it does not compute right.
- kit skips, test skips: the platform declares not to do it, or the machine could not.
- not run: there is a case or a test, and no result.
- empty: there is neither. It may work: `anytron verify` says so for your model, your layout and your machine.

TP has sequence parallelism; all sizes are 2. `bshd` is padded rows, everything else packed (`thd`). `basalt` is the
[sample platform](../../examples/third_party_platform/README.md), and `ascend` is the real torch_npu on the
[simulator](../../plugins/ascend/simulator/README.md), not an NPU. This command measures all that can be measured where
it runs, and writes this page:

<!-- needs: half an hour -->
```sh
python -m tests.docs.measure
```
"""
ASCEND = "plugins/ascend/tests"
AGREEMENT = "tests/backends/megatron/engine/test_agreement.py::test_a_gpu_agrees_with_the_processor"
MINDSPEED, LLM = "ascend, adaptor mindspeed", "ascend, engine mindspeed_llm"


@dataclass(frozen=True)
class Kit:
    """A run of the conformance kit, whose results have a file.

    Attributes:
        title: The platform as a run would name it, with the adaptor where that is another one.
        platform: Its name.
        options: ``platform.options``, ``KEY=VALUE`` each.
        levels: Those that are checked; empty = all.
        variable: Environment variable that must name a checkout, whose packages are imported; empty if none must.
    """

    title: str
    platform: str
    options: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    variable: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """``anytron conformance ...``, word by word."""
        levels = (word for level in self.levels for word in ("--level", level))
        return ("anytron", "conformance", self.platform, *self.options, *levels, "--json")


KITS = {
    **{f"conformance-{name}": Kit(name, name) for name in ("cpu", "basalt", "ascend", "cuda")},
    # The other levels are about the device and about kernels of portable modules, whatever the adaptor.
    "conformance-mindspeed": Kit(
        MINDSPEED, "ascend", ("adaptor=mindspeed",), ("model", "training"), "ANYTRON_MINDSPEED"
    ),
}
"""By the name of the file; basalt is the sample platform, of an invented chip."""


@dataclass(frozen=True)
class Proof:
    """What one test shows.

    Attributes:
        family: ``model_type``.
        layouts: Columns of the table.
        test: File and function, and the case if it is one of several.
    """

    family: str
    layouts: tuple[str, ...]
    test: str


@dataclass(frozen=True)
class Group:
    """Tests that are run together, and whose results have a file.

    Attributes:
        title: The platform as a run would name it, with the adaptor or the engine where that is another one.
        platform: What must be usable.
        proofs: What the tests show.
        variable: Environment variable that must name a checkout; empty if none must.
    """

    title: str
    platform: str
    proofs: tuple[Proof, ...]
    variable: str = ""


FORMATS = ("one rank", "one rank bshd")
RANKS = "test_two_ranks_of_each_kind"


def _column(layout: str) -> str:
    """A layout's name with ``bshd`` for padded rows, and the sizes left out."""
    padded = layout.endswith(", padded")
    name = layout.removesuffix(", padded").replace("VPP2", "VPP").replace("2", "").replace(", ", " ")
    return f"{name} bshd" if padded else name


def _of_families() -> Iterator[Proof]:
    test = "tests/backends/megatron/families/test_families.py::test_a_layout_agrees_with_the_first"
    for model in MODELS:
        for layout in model.layouts:
            yield Proof(model.family.model_type, (_column(layout.name),), f"{test}[{model.name}-{layout.name}]")


def _beside_megatron() -> Iterator[Proof]:
    test = f"{ASCEND}/mindspeed/test_training.py::test_dense_and_sparse_and_latent_attention_in_both_formats"
    yield Proof("qwen3", FORMATS, test)
    yield from (Proof(family, FORMATS[:1], test) for family in ("qwen3_moe", "deepseek_v3"))
    yield Proof("qwen3", ("TP", "CP", "CP bshd"), f"{ASCEND}/mindspeed/test_training.py::{RANKS}_in_turn")


def _by_mindspeed_llm() -> Iterator[Proof]:
    test = f"{ASCEND}/mindspeed_llm/test_training.py::test_families_in_both_formats"
    yield Proof("qwen3", FORMATS, test)
    yield from (Proof(family, FORMATS[:1], test) for family in ("qwen2", "llama", "qwen3_moe"))
    ranks = f"{ASCEND}/mindspeed_llm/test_training.py::{RANKS}"
    yield from (Proof("qwen3", ("TP", "PP", "DP"), ranks), Proof("qwen3_moe", ("EP",), ranks))


NPUS = Proof("qwen3", ("TP", "TP bshd", "CP"), f"{ASCEND}/test_training.py::test_two_npus_agree_with_the_processor")
GROUPS = {
    "families-cpu": Group("cpu", "cpu", tuple(_of_families())),
    "training-cuda": Group("cuda", "cuda", (Proof("qwen3", FORMATS, AGREEMENT),)),
    "training-ascend": Group("ascend", "ascend", (NPUS,)),
    "training-mindspeed": Group(MINDSPEED, "ascend", tuple(_beside_megatron()), "ANYTRON_MINDSPEED"),
    "training-mindspeed-llm": Group(LLM, "ascend", tuple(_by_mindspeed_llm()), "ANYTRON_MINDSPEED_LLM"),
}
"""By the name of the file."""
PLATFORMS = ("cpu", "basalt", "cuda", "ascend", MINDSPEED, LLM)
"""In the page's order."""


def kit_cells() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The kit's cases by family and column: each a rule's name and a case's."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for rule in rules_of("model"):
        for case in (case for case in rule.cases if case.values is not None):  # others are of no family
            family, layout, *_ = case.values
            key = CONFIGS[family.name]["model_type"], _column(layout.name)
            found.setdefault(key, []).append((rule.name, case.name))
    return found


def test_cells(title: str) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The tests of a platform by family and column: each the name of its file and its id."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, group in GROUPS.items():
        for proof in group.proofs if group.title == title else ():
            for layout in proof.layouts:
                found.setdefault((proof.family, layout), []).append((name, proof.test))
    return found


def render() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEADING, *(line for title in PLATFORMS for line in _section(title))]).rstrip() + "\n"


def _section(title: str) -> list[str]:
    """What is known of a platform."""
    kit: Measured | None = None
    lines = [f"## {title}\n"]
    for name, one in KITS.items():
        if one.title == title:
            kit = measured(name)
            lines += [*_made(name, " ".join(one.command)), *_levels(kit)]
    groups = {name: group for name, group in GROUPS.items() if group.title == title}
    for name, group in groups.items():
        tests = dict.fromkeys(proof.test.partition("[")[0] for proof in group.proofs)
        lines += _made(name, f"pytest {' '.join(tests)}")
    return [*lines, *_families(title, kit), ""]


def _made(name: str, command: str) -> list[str]:
    """How, when and with what a measurement was made."""
    one = measured(name)
    if one is None:
        return [f"`{command}`: {NOT_RUN}.\n"]
    versions = ", ".join(f"{package} {version}" for package, version in one.versions.items())
    return [f"`{one.command}`, on {one.date}, {one.seconds} s ([results](results/{name}.json)): {versions}.\n"]


def _levels(kit: Measured | None) -> list[str]:
    """The kit's rules, counted, and those that are not kept."""
    if kit is None:
        return []
    lines = ["| level | passed | failed | skipped | cases | cases skipped |", "|---|---|---|---|---|---|"]
    for level, members in groupby(kit.rules, key=lambda rule: rule["name"].partition(".")[0]):
        rules = list(members)
        counts = [sum(rule["status"] == status for rule in rules) for status in ("passed", "failed", "skipped")]
        counts += [sum(len(rule["made"]) + (rule["broken"] is not None) for rule in rules)]
        counts += [sum(len(rule["left_out"]) or rule["status"] == "skipped" for rule in rules)]
        lines.append(f"| {level} | {' | '.join(map(str, counts))} |")
    failed = [rule for rule in kit.rules if rule["status"] == "failed"]
    lines.append("")
    titles = [rule["name"].partition(".")[2] for rule in failed]
    cases = [rule["broken"] or "it" for rule in failed]
    lines += [f"- [{title}](conformance.md#{title}) fails: {case}" for title, case in zip(titles, cases, strict=True)]
    return [*lines, ""] if failed else lines


def _families(title: str, kit: Measured | None) -> list[str]:
    """The table of families and layouts."""
    has_kit = any(one.title == title for one in KITS.values())
    by_kit, by_test = kit_cells() if has_kit else {}, test_cells(title)
    columns = list(dict.fromkeys(column for _, column in (*by_kit, *by_test)))
    lines = [f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for model_type, family in FAMILIES.items():
        places = [(model_type, column) for column in columns]
        if not any(place in by_kit or place in by_test for place in places):
            continue
        cells = []
        for place in places:
            found = {}
            if place in by_kit:
                found["kit"] = worst(of_case(kit, *case) for case in by_kit[place])
            if place in by_test:
                found["test"] = worst(of_test(measured(name), test) for name, test in by_test[place])
            cells.append(_cell(found))
        lines.append(f"| {' | '.join([family.title, *cells])} |")
    return lines


def _cell(found: dict[str, str]) -> str:
    """Say what the kit and tests have found, each if there is one of it."""
    if set(found.values()) == {NOT_RUN}:
        return NOT_RUN
    words = {"passed": "{}", "failed": "**{} fails**", "skipped": "{} skips"}
    return ", ".join(words[result].format(who) for who, result in found.items() if result != NOT_RUN)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
