"""Patches of the adaptor ``mindspeed``: one imports MindSpeed, the others fix its attention, arguments and imports."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from anytron import Patch, Phase, PlatformError
from anytron.sequences import current_mask
from anytron_megatron import stand_in_during_imports

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron import Installed, PatchContext


_HERE = "anytron_ascend.mindspeed"

_TE_ATTENTION = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"

TRITON_IMPORTS = Patch(
    id="ascend.mindspeed-triton-imports",
    target="mindspeed.ops.triton",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="MindSpeed imports its triton kernels even if no model needs them, and triton-ascend may be absent",
    upstream="mindspeed/features_manager/megatron_basic/requirements_basic.py, te_adaptation",
    remove_when="MindSpeed imports triton where it uses it",
    install=f"{_HERE}.patches:stand_in_for_mindspeed",
)

MINDSPEED = Patch(
    id="ascend.mindspeed",
    target="mindspeed.megatron_adaptor",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    imports="megatron.core",
    reason="Megatron on NPUs: Transformer Engine's modules, fused kernels, ring attention",
    upstream="https://gitcode.com/Ascend/MindSpeed, branch core_r0.16.0",
    remove_when="Megatron runs on NPUs by itself",
    install=f"{_HERE}.process_state:import_mindspeed",
    stays="torch.cuda stays redirected to torch.npu (torch_npu.contrib.transfer_to_npu)",
)

MODEL_CONFIG = Patch(
    id="ascend.mindspeed-model-config",
    target="mcore_bridge.config.model_config:ModelConfig._augment_mindspeed_defaults",
    phase=Phase.BEFORE_BUILD,
    package="mcore-bridge",
    requires=">=1.6.5,<1.7",
    reason=(
        "MindSpeed's modules read its arguments from the model's config; mcore-bridge gives every model the "
        "defaults, changes MindSpeed's list of features to find them, and only warns where it fails"
    ),
    upstream="mcore_bridge/config/model_config.py, _augment_mindspeed_defaults",
    remove_when="mcore-bridge takes MindSpeed's arguments as they are",
    replacement=f"{_HERE}.patches:take_arguments",
)

ATTENTION = tuple(
    Patch(
        id=f"ascend.mindspeed-attention{suffix}",
        target=target,
        phase=Phase.BEFORE_BUILD,
        reason=(
            "MindSpeed passes cu_seqlens with its leading 0 and real lengths to a kernel that wants the ends of "
            "the sequences in the buffer, and takes the kernel's mode from a config that earlier calls have changed"
        ),
        upstream="mindspeed/te/pytorch/attention/dot_product_attention/backend.py, line 83; "
        "mindspeed/core/context_parallel/dot_product_attention.py, line 137",
        remove_when="MindSpeed passes the padded ends, and a mask's mode with the mask",
        replacement=f"{_HERE}.patches:call_as_documented",
    )
    for suffix, target in (
        ("", f"{_TE_ATTENTION}:TEDotProductAttention.forward"),
        ("-cp", "mindspeed.core.context_parallel.dot_product_attention:CPDotProductAttentionImpl.forward"),
    )
)

PATCHES = (TRITON_IMPORTS, MINDSPEED, MODEL_CONFIG, *ATTENTION)

CAUSAL, FULL = "sparse_mode=2", "sparse_mode=1"
"""Kernel modes of masks: left-up causal with the compressed triangle, and a mask of full size."""

MASK_TYPES = {CAUSAL: "causal", FULL: "general"}
"""``config.attention_mask_type`` by kernel mode; MindSpeed's Transformer Engine modules read it."""

MODES = {CAUSAL: 2, FULL: 1}
"""``config.sparse_mode`` by kernel mode; MindSpeed's other modules read it, and a call without a mask sets it to 2."""

KERNELS = "Gated DeltaNet and other kernels for triton-ascend"


def call_as_documented(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of MindSpeed's attention: set the micro-batch's mask mode, and pass padded lengths."""

    @functools.wraps(forward)
    def call(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        mask = current_mask()
        if mask is None or mask.kernel_mode not in MODES:
            raise PlatformError(
                "MindSpeed's attention was called without a mask that its kernel can use.",
                where="adaptor mindspeed",
                why="no mask is set"
                if mask is None
                else f"the mask's kernel mode is {mask.kernel_mode}, not {' or '.join(MODES)}",
                fix="call the model through anytron_megatron.forward(model, prepared), which sets the platform's mask",
            )
        self.config.attention_mask_type = MASK_TYPES[mask.kernel_mode]
        self.config.sparse_mode = MODES[mask.kernel_mode]
        return forward(
            self,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=_ends_of_padded_sequences(packed_seq_params),
        )

    return call


def _ends_of_padded_sequences(packed: Any) -> Any:
    """Describe packed sequences as they lie in the buffer, by their ends alone.

    MindSpeed passes ``cu_seqlens_q`` to the kernel: with a leading 0, which TND does not have, and with the real
    lengths, although sequences have their padded lengths in the buffer. Padding stands behind the real tokens of its
    sequence, where causal attention sees it from padding alone.
    """
    if packed is None:
        return None
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    ends = ends[1:]
    return dataclasses.replace(
        packed, cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends
    )


def take_arguments(_original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``ModelConfig._augment_mindspeed_defaults``: read the arguments that the engine has installed.

    The engine has set Megatron's own fields, such as ``variable_seq_lengths``, in its config: MindSpeed's arguments
    with these names only select its patches.
    """

    def _augment_mindspeed_defaults(self: Any) -> None:
        from megatron.core.transformer import TransformerConfig
        from mindspeed.args_utils import get_full_args

        megatrons = {field.name for field in dataclasses.fields(TransformerConfig)}
        for name, value in vars(get_full_args()).items():
            if name not in megatrons:
                setattr(self, name, value)

    return _augment_mindspeed_defaults


def stand_in_for_mindspeed(_context: PatchContext) -> Installed:
    """Let MindSpeed be imported without triton-ascend."""
    return stand_in_during_imports({"mindspeed.ops.triton": KERNELS})


def stand_in_for_mindspeed_llm(_context: PatchContext) -> Installed:
    """Let MindSpeed and MindSpeed-LLM be imported without triton-ascend."""
    return stand_in_during_imports(dict.fromkeys(("mindspeed.ops.triton", "mindspeed_llm.ops.triton"), KERNELS))
