"""Let MindSpeed's packages be imported without triton-ascend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_megatron import stand_in_during_imports

if TYPE_CHECKING:
    from anytron import Installed, PatchContext

KERNELS = "Gated DeltaNet and other kernels for triton-ascend"


def stand_in_for_mindspeed(_context: PatchContext) -> Installed:
    """Let MindSpeed be imported without triton-ascend."""
    return stand_in_during_imports({"mindspeed.ops.triton": KERNELS})


def stand_in_for_mindspeed_llm(_context: PatchContext) -> Installed:
    """Let MindSpeed and MindSpeed-LLM be imported without triton-ascend."""
    return stand_in_during_imports(dict.fromkeys(("mindspeed.ops.triton", "mindspeed_llm.ops.triton"), KERNELS))
