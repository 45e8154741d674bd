"""Patches of Gated DeltaNet layers."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import BRIDGE, BRIDGE_VERSIONS, FIXES, MEGATRON

_DELTA_NET = "mcore_bridge.model.modules.gated_delta_net"

DELTA_NET_PADDING = Patch(
    id="megatron.gated-delta-net-padding",
    target=f"{_DELTA_NET}:GatedDeltaNet.forward",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "the layer ignores the attention mask ('TODO: Deal with attention_mask'), so that padding enters its "
        "convolution and its recurrent state"
    ),
    upstream=(
        "https://github.com/modelscope/ms-swift/pull/9196; mcore_bridge/model/modules/gated_delta_net.py, line 215"
    ),
    remove_when="the layer takes a map of real tokens and leaves padding out",
    replacement=f"{FIXES}.delta_net_padding:leave_out_padding",
)
DELTA_NET_CONTEXT = Patch(
    id="megatron.gated-delta-net-context",
    target="megatron.core.ssm.gated_delta_net:tensor_a2a_cp2hp",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires="<0.18",
    reason=(
        "with context parallelism mcore-bridge's layer imports functions that Megatron does not have yet, and would "
        "exchange each packed sequence on its own"
    ),
    upstream=(
        "megatron-core 0.18.0, megatron/core/ssm/gated_delta_net.py, tensor_a2a_cp2hp; "
        "mcore_bridge/model/modules/gated_delta_net.py, line 275"
    ),
    remove_when="megatron-core before 0.18 is not supported, and mcore-bridge exchanges a packed buffer in one piece",
    install=f"{FIXES}.delta_net_context:install_exchange",
)
DELTA_NET_GRADIENTS = Patch(
    id="megatron.gated-delta-net-gradients",
    target=f"{_DELTA_NET}:GatedDeltaNet.__init__",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "with tensor parallelism the input norm's gradient is tp times too large if sequence parallelism is on, and "
        "the output norm's covers one rank's heads only if it is off"
    ),
    upstream=(
        "mcore_bridge/model/modules/gated_delta_net.py, line 219: the sequence is gathered before the norm; "
        "megatron/core/distributed/finalize_model_grads.py, line 354: only q_layernorm and k_layernorm are summed"
    ),
    remove_when="mcore-bridge marks both parameters so that Megatron sums their gradients correctly",
    replacement=f"{FIXES}.delta_net_gradients:sum_partial_gradients",
)
DELTA_NET_KERNELS = Patch(
    id="megatron.gated-delta-net-kernels",
    target=f"{_DELTA_NET}:chunk_gated_delta_rule",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason="Gated DeltaNet layers compute with flash-linear-attention, which supports few devices",
    upstream=(
        "mcore_bridge/model/modules/gated_delta_net.py, line 20; "
        "megatron/core/ssm/gated_delta_net.py, line 104: ImportError without fla"
    ),
    remove_when="layers take their kernels from their module specs",
    install=f"{FIXES}.delta_net_kernels:install_kernels",
)
