"""Patches of the routers of expert layers."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import FIXES, MEGATRON

ROUTER_PADDING = Patch(
    id="megatron.router-padding",
    target="megatron.core.transformer.moe.router:TopKRouter.forward",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.16",
    reason=(
        "auxiliary losses and expert biases count padding: mcore-bridge's forward takes no padding mask, and its "
        "vision models drop unknown arguments (on later pipeline stages all of them)"
    ),
    upstream="mcore_bridge/model/gpt_model.py, forward; mcore_bridge/model/mm_gpt_model.py, line 125: kwargs = {}",
    remove_when="mcore-bridge's models take padding_mask, as Megatron's own GPTModel.forward does",
    replacement=f"{FIXES}.router_padding:mask_padding",
)
ROUTER_GEMM = Patch(
    id="megatron.router-gemm",
    target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.13,<0.17",
    reason="without Transformer Engine the router raises NameError: name 'te_general_gemm' is not defined",
    upstream="megatron-core 0.16.1, moe_utils.py, lines 16 to 39 and 1192; 0.19 defines it as None",
    remove_when="megatron-core before 0.17 is not supported",
    install=f"{FIXES}.router_gating:define_missing_gemm",
)
