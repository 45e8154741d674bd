"""The patches of the adaptor ``mindspeed``: MindSpeed itself, and fixes of it."""

from __future__ import annotations

from anytron import Patch, Phase

_HERE = "anytron_ascend.mindspeed"
_TE_ATTENTION = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"

TRITON_IMPORTS = Patch(
    id="ascend.mindspeed-triton-imports",
    target="mindspeed.ops.triton",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="it imports its triton kernels whether a model needs them or not; triton-ascend may be absent",
    upstream="mindspeed/features_manager/megatron_basic/requirements_basic.py, te_adaptation",
    remove_when="MindSpeed imports triton where it uses it",
    install=f"{_HERE}.fixes:stand_in_for_mindspeed",
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
    replacement=f"{_HERE}.fixes:take_arguments",
)
ATTENTION = tuple(
    Patch(
        id=f"ascend.mindspeed-attention{suffix}",
        target=target,
        phase=Phase.BEFORE_BUILD,
        reason=(
            "MindSpeed passes cu_seqlens with its leading 0 and real lengths to a kernel that wants the ends of "
            "the sequences in the buffer, and takes the kernel's mode from a config that calls change for good"
        ),
        upstream="mindspeed/te/pytorch/attention/dot_product_attention/backend.py, line 83; "
        "mindspeed/core/context_parallel/dot_product_attention.py, line 137",
        remove_when="MindSpeed passes the padded ends, and a mask's mode with the mask",
        replacement=f"{_HERE}.fixes:call_as_documented",
    )
    for suffix, target in (
        ("", f"{_TE_ATTENTION}:TEDotProductAttention.forward"),
        ("-cp", "mindspeed.core.context_parallel.dot_product_attention:CPDotProductAttentionImpl.forward"),
    )
)
PATCHES = (TRITON_IMPORTS, MINDSPEED, MODEL_CONFIG, *ATTENTION)
