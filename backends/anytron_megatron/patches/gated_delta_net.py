"""What mcore-bridge's Gated DeltaNet layers need: kernels, a mask, and two gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from anytron.patches import Patch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.hooks.types import PatchContext

MODULE = "mcore_bridge.model.modules.gated_delta_net"
PACKAGE, REQUIRES = "mcore-bridge", ">=1.6.5,<1.7"


def gated_delta_net_patches(context: PatchContext, owner: str) -> list[Patch]:
    """Return the patches of Gated DeltaNet.

    A real flash-linear-attention stays where it computes: on the devices that Transformer Engine computes on.
    """
    patches = [padding(owner), gradients(owner)]
    if context.platform.portable_modules or not find_spec("fla"):
        patches.append(kernels(context, owner))
    return patches


def kernels(context: PatchContext, owner: str) -> Patch:
    """Let Gated DeltaNet compute with the platform's kernels."""

    def install() -> Callable[[], None]:
        from anytron_megatron.patches.delta_net_kernels import install_kernels

        return install_kernels(context.kernels, context.platform.runtime().device_type)

    return Patch(
        id="megatron.gated-delta-net-kernels",
        owner=owner,
        target=f"{MODULE}:chunk_gated_delta_rule",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires=REQUIRES,
        reason="Gated DeltaNet layers compute with flash-linear-attention, which is there for few devices",
        upstream=(
            "mcore_bridge/model/modules/gated_delta_net.py, line 20; "
            "megatron/core/ssm/gated_delta_net.py, line 104: ImportError without fla"
        ),
        remove_when="layers take their kernels from their module specs",
        install=install,
    )


def padding(owner: str) -> Patch:
    """Keep padding out of the recurrence, on every pipeline stage."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.delta_net_padding import leaving_out_padding

        return leaving_out_padding(original)

    return Patch(
        id="megatron.gated-delta-net-padding",
        owner=owner,
        target=f"{MODULE}:GatedDeltaNet.forward",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires=REQUIRES,
        reason=(
            "the layer reads no mask ('TODO: Deal with attention_mask'), and Megatron's blocks hand it nothing else: "
            "padding of rows enters its convolution and its recurrent state"
        ),
        upstream=(
            "https://github.com/modelscope/ms-swift/pull/9196; mcore_bridge/model/modules/gated_delta_net.py, line 215"
        ),
        remove_when="the layer is handed a map of real tokens and keeps the others out",
        replacement=replace,
    )


def gradients(owner: str) -> Patch:
    """Give the norms of the layer the gradients that they have on one rank."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.delta_net_gradients import summing_what_is_partial

        return summing_what_is_partial(original)

    return Patch(
        id="megatron.gated-delta-net-gradients",
        owner=owner,
        target=f"{MODULE}:GatedDeltaNet.__init__",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires=REQUIRES,
        reason=(
            "with tensor parallelism the gradient of the input norm is tp times too large (with sequence parallelism), "
            "and that of the output norm holds one rank's heads only (without)"
        ),
        upstream=(
            "mcore_bridge/model/modules/gated_delta_net.py, line 219: the sequence is gathered before the norm; "
            "megatron/core/distributed/finalize_model_grads.py, line 354: only q_layernorm and k_layernorm are summed"
        ),
        remove_when="mcore-bridge marks both parameters by what their gradients are",
        replacement=replace,
    )
