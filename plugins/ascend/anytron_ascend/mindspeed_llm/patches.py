"""What is changed for the engine: MindSpeed-LLM itself, and what it does to packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.patches import Patch, Phase
from anytron_ascend.mindspeed.triton_imports import triton_imports
from anytron_ascend.mindspeed_llm.installation import BRANCHES, find_installation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anytron.hooks.types import PatchContext

OWNER = "ascend"


def engine_patches(context: PatchContext) -> Iterable[Patch]:
    """Return the patches of a training rank of this engine."""
    triton = triton_imports(
        "ascend.mindspeed-llm-triton-imports", OWNER, "mindspeed.ops.triton", "mindspeed_llm.ops.triton"
    )
    return [triton, _mindspeed_llm(context), _sequence_ends()]


def _mindspeed_llm(context: PatchContext) -> Patch:
    found: list[str] = []

    def install() -> Callable[[], None]:
        from anytron_ascend.mindspeed_llm.process_state import import_mindspeed_llm

        # First of all: MindSpeed answers for importlib.metadata.version afterwards.
        installation = find_installation()
        found.append(
            f"MindSpeed-LLM {installation.mindspeed_llm}, MindSpeed {installation.mindspeed}, "
            f"megatron-core {installation.megatron}"
        )
        context.platform.runtime()
        return import_mindspeed_llm()

    return Patch(
        id="ascend.mindspeed-llm",
        owner=OWNER,
        target="mindspeed_llm.megatron_adaptor",
        phase=Phase.BEFORE_IMPORT,
        before="megatron.core",
        imports="megatron.core",
        reason="MindSpeed-LLM's models and MindSpeed's kernels for them",
        upstream=f"https://gitcode.com/Ascend/MindSpeed-LLM, branch {BRANCHES['MindSpeed-LLM']}",
        remove_when="the engine megatron trains these models as fast on NPUs",
        install=install,
        describe=lambda: found[-1],
        stays="torch.cuda stays redirected to torch.npu (torch_npu.contrib.transfer_to_npu)",
    )


def _sequence_ends() -> Patch:
    def replace(_original: Callable[..., Any]) -> Callable[..., Any]:
        def as_they_are(ends: Any, micro_batch_size: int) -> Any:
            del micro_batch_size
            return ends

        return as_they_are

    return Patch(
        id="ascend.mindspeed-llm-sequence-ends",
        owner=OWNER,
        target="mindspeed_llm.training.utils:recompute_valid_actual_seq_len",
        phase=Phase.BEFORE_BUILD,
        reason=(
            "it takes a packed sequence of one token for the beginning of padding and joins all that follow it to "
            "one sequence, whose tokens then see each other"
        ),
        upstream="mindspeed_llm/training/utils.py, recompute_valid_actual_seq_len",
        remove_when="MindSpeed-LLM's own data loader drops its padding",
        replacement=replace,
    )
