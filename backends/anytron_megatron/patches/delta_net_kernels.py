"""Let Gated DeltaNet compute with the platform's kernels."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from anytron.base.errors import EngineError
from anytron.device.patches import Installed
from anytron.kernels.contract import KernelName, KernelSpec
from anytron_megatron.models.release import delta_net_modules

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.device.hooks.types import PatchContext


def install_kernels(context: PatchContext) -> Installed:
    """Give mcore-bridge's Gated DeltaNet the platform's kernels.

    mcore-bridge calls them by the names and signatures of flash-linear-attention (``None`` without that package).
    Its layer inherits the constructor of Megatron's class, which refuses to build without the package, although
    the layer then uses nothing of it: what the constructor keeps, mcore-bridge's forward does not call.
    """
    from mcore_bridge.model.modules import gated_delta_net as bridge

    from anytron.kernels.gated_delta_rule import l2norm

    constructor, rules = delta_net_modules()
    spec = KernelSpec(context.platform.runtime().device_type)
    convolve = context.kernels.fused_kernel(KernelName.CAUSAL_CONV1D, spec)
    rule = context.kernels.fused_kernel(KernelName.GATED_DELTA_RULE, spec)

    def causal_conv1d(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, None]:
        """Stand in for ``fla.modules.convolution.causal_conv1d`` as the layer calls it; there is no final state."""
        return convolve(x, weight, bias, activation in ("silu", "swish"), cu_seqlens), None

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Stand in for ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` as the layer calls it; no final state.

        The other arguments say that there is no initial state, that the caller wants no final one, and that
        queries and keys are normalised already.
        """
        wanted = {name: value for name, value in unused.items() if value not in (None, False)}
        if wanted:
            raise EngineError("The gated delta rule does not have these options.", why=str(sorted(wanted)))
        return rule(q, k, v, g, beta, q.shape[-1] ** -0.5, cu_seqlens), None

    with ExitStack() as stack:
        for module, name, value in (
            (constructor, "HAVE_FLA", True),
            (rules, "chunk_gated_delta_rule", chunk_gated_delta_rule),
            (bridge, "l2norm", l2norm),
            (bridge, "causal_conv1d", causal_conv1d),
            (bridge, "chunk_gated_delta_rule", chunk_gated_delta_rule),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        return Installed(stack.pop_all().close)
