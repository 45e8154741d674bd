"""Write ``docs/reference/support-matrix.md``: which tests show which family on which platform in which layout.

Run ``python -m tests.docs.support_matrix docs/reference/support-matrix.md`` after a change; a test compares. A row
is a claim: a test requires the one that it names to exist, and CI or the machine that it names has to run that.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from anytron.testing.model import table as kit
from anytron_megatron.models.families import FAMILIES
from tests.backends.megatron.families.layouts import MODELS

HEADING = """# Support matrix

<!-- Generated from tests/docs/support_matrix.py and tests/backends/megatron/families/layouts.py by
`python -m tests.docs.support_matrix docs/reference/support-matrix.md`. -->

Which family has been shown to compute right, on which platform, in which layout: a cell says where the test runs that
shows it. Such a test trains a tiny model on recorded trajectories, through real Megatron, and compares log-probs,
gradient norms and weights with another platform, or with Hugging Face and every other layout ([figures](families.md)).
Or it is level `model` of the [conformance kit](conformance.md), which compares logits, log-probs and the gradient of
every parameter with those of transformers, and other layouts with one rank.

- **CI**: with every change, on a machine without an accelerator. `ascend` there is the real torch_npu on the
  [simulator](../../plugins/ascend/simulator/README.md), not an NPU.
- **slow**: likewise, but with `tox -e slow`, before an issue is closed.
- **checkout**: where the environment names a checkout of MindSpeed, on the same simulator.
- **GPU**: by hand, on an NVIDIA H200, with the tests marked `gpu`.
- empty: nobody has shown it. It may work: `anytron verify` says so for your model, your layout and your machine.

TP has sequence parallelism; all sizes are 2. `bshd` is padded rows, everything else packed (`thd`).
"""
CPU = "tests/backends/megatron/families/test_families.py::test_a_layout_agrees_with_the_first"
AGREEMENT = "tests/backends/megatron/engine/test_agreement.py"
ASCEND = "plugins/ascend/tests"


@dataclass(frozen=True)
class Proof:
    """What one test shows.

    Attributes:
        platform: As a run would name it, with the adaptor or the engine where that is another one.
        family: ``model_type``.
        layouts: Columns of the table.
        where: ``CI``, ``slow``, ``checkout`` or ``GPU``.
        test: File and function.
    """

    platform: str
    family: str
    layouts: tuple[str, ...]
    where: str
    test: str


def _on_the_processor() -> list[Proof]:
    return [
        Proof("cpu", model.family.model_type, (_column(layout.name),), "slow" if model.is_slow(layout) else "CI", CPU)
        for model in MODELS
        for layout in model.layouts
    ]


def _column(layout: str) -> str:
    """A layout's name with ``bshd`` for padded rows, and the sizes left out."""
    padded = layout.endswith(", padded")
    name = layout.removesuffix(", padded").replace("VPP2", "VPP").replace("2", "").replace(", ", " ")
    return f"{name} bshd" if padded else name


def _on_npus() -> list[Proof]:
    of_all = tuple(_column(one.name) for one in (kit.ONE, kit.PADDED, kit.TENSOR, kit.PIPELINE, kit.CONTEXT))
    return [
        *(Proof("ascend", family.name, of_all, "CI", BY_THE_KIT) for family in kit.FAMILIES),
        *(Proof("ascend", family.name, (_column(kit.EXPERT.name),), "CI", BY_THE_KIT) for family in kit.MIXTURES),
    ]


MINDSPEED, LLM = "ascend, adaptor mindspeed", "ascend, engine mindspeed_llm"
FORMATS = ("one rank", "one rank bshd")
BESIDE_MEGATRON = f"{ASCEND}/mindspeed/test_training.py::test_dense_and_sparse_and_latent_attention_in_both_formats"
BY_MINDSPEED_LLM = f"{ASCEND}/mindspeed_llm/test_training.py::test_families_in_both_formats"
BY_THE_KIT = f"{ASCEND}/test_conformance.py::test_conformance"
RANKS = "test_two_ranks_of_each_kind"
PROOFS = (
    *_on_the_processor(),
    Proof("cuda", "qwen3", FORMATS, "GPU", f"{AGREEMENT}::test_a_gpu_agrees_with_the_processor"),
    Proof(
        "ascend",
        "qwen3",
        ("TP", "TP bshd", "CP"),
        "CI",
        f"{ASCEND}/test_training.py::test_two_npus_agree_with_the_processor",
    ),
    *_on_npus(),
    Proof(MINDSPEED, "qwen3", FORMATS, "checkout", BESIDE_MEGATRON),
    *(Proof(MINDSPEED, family, FORMATS[:1], "checkout", BESIDE_MEGATRON) for family in ("qwen3_moe", "deepseek_v3")),
    Proof(
        MINDSPEED,
        "qwen3",
        ("TP", "CP", "CP bshd"),
        "checkout",
        f"{ASCEND}/mindspeed/test_training.py::{RANKS}_in_turn",
    ),
    Proof(LLM, "qwen3", FORMATS, "checkout", BY_MINDSPEED_LLM),
    *(Proof(LLM, family, FORMATS[:1], "checkout", BY_MINDSPEED_LLM) for family in ("qwen2", "llama", "qwen3_moe")),
    Proof(LLM, "qwen3", ("TP", "PP", "DP"), "checkout", f"{ASCEND}/mindspeed_llm/test_training.py::{RANKS}"),
    Proof(LLM, "qwen3_moe", ("EP",), "checkout", f"{ASCEND}/mindspeed_llm/test_training.py::{RANKS}"),
)


def render() -> str:
    """The whole page, as Markdown."""
    lines = [HEADING]
    layouts = list(dict.fromkeys(layout for proof in PROOFS for layout in proof.layouts))
    for platform in dict.fromkeys(proof.platform for proof in PROOFS):
        proofs = [proof for proof in PROOFS if proof.platform == platform]
        columns = [one for one in layouts if any(one in proof.layouts for proof in proofs)]
        lines += [f"## {platform}\n", f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for family in dict.fromkeys(proof.family for proof in proofs):
            # Where two tests show the same, that of CI counts: it sorts first.
            shown = sorted((proof for proof in proofs if proof.family == family), key=lambda proof: proof.where)
            where = {one: proof.where for proof in reversed(shown) for one in proof.layouts}
            cells = [FAMILIES[family].title, *(where.get(column, "") for column in columns)]
            lines.append(f"| {' | '.join(cells)} |")
        tests = ", ".join(f"`{test}`" for test in dict.fromkeys(proof.test for proof in proofs))
        lines.append(f"\nShown by {tests}.\n")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
