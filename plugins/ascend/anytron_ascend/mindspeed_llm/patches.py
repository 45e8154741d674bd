"""The patches of the adaptor ``mindspeed_llm``: MindSpeed-LLM itself, and fixes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron import Patch, Phase
from anytron_ascend.mindspeed_llm.installation import BRANCHES

if TYPE_CHECKING:
    from collections.abc import Callable

_HERE = "anytron_ascend.mindspeed_llm"

TRITON_IMPORTS = Patch(
    id="ascend.mindspeed-llm-triton-imports",
    target="mindspeed_llm.ops.triton",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="MindSpeed imports triton kernels even if no model needs them, and triton-ascend may be absent",
    upstream="mindspeed/features_manager/megatron_basic/requirements_basic.py, te_adaptation",
    remove_when="MindSpeed imports triton where it uses it",
    install="anytron_ascend.mindspeed.patches:stand_in_for_mindspeed_llm",
)
MINDSPEED_LLM = Patch(
    id="ascend.mindspeed-llm",
    target="mindspeed_llm.megatron_adaptor",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    imports="megatron.core",
    reason="MindSpeed-LLM's models and MindSpeed's kernels for them",
    upstream=f"https://gitcode.com/Ascend/MindSpeed-LLM, branch {BRANCHES['MindSpeed-LLM']}",
    remove_when="the engine megatron trains these models as fast on NPUs",
    install=f"{_HERE}.process_state:import_mindspeed_llm",
    stays="torch.cuda stays redirected to torch.npu (torch_npu.contrib.transfer_to_npu)",
)
SEQUENCE_ENDS = Patch(
    id="ascend.mindspeed-llm-sequence-ends",
    target="mindspeed_llm.training.utils:recompute_valid_actual_seq_len",
    phase=Phase.BEFORE_BUILD,
    reason=(
        "MindSpeed-LLM takes a packed sequence of one token for the beginning of padding and joins all that follow "
        "to one sequence, whose tokens then see each other"
    ),
    upstream="mindspeed_llm/training/utils.py, recompute_valid_actual_seq_len",
    remove_when="MindSpeed-LLM's own data loader drops its padding",
    replacement=f"{_HERE}.patches:keep_sequence_ends",
)
PATCHES = (TRITON_IMPORTS, MINDSPEED_LLM, SEQUENCE_ENDS)


def keep_sequence_ends(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``recompute_valid_actual_seq_len``: return the sequence ends that the batch gives, unchanged."""

    def recompute_valid_actual_seq_len(ends: Any, _micro_batch_size: int) -> Any:
        return ends

    return recompute_valid_actual_seq_len
