"""Adaptor ``none``: portable modules whose kernels are torch_npu's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron import Patch, Phase
from anytron_ascend.adaptors.adaptor import Adaptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anytron import PatchContext
    from anytron.kernels import AttentionKernel, AttentionSpec, KernelName


class PortableAdaptor(Adaptor):
    """Portable modules with torch_npu's kernels.

    Masks are the neutral ones: in thd the kernel has the lengths, in right-padded bshd it is causal, and the
    compressed mask that belongs to both is the kernel's own.
    """

    portable_modules = True
    redirects_torch_cuda = True

    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Keep mcore-bridge from taking MindSpeed's side branches."""
        del context
        return [_BRIDGE_WITHOUT_MINDSPEED] if phase is _BRIDGE_WITHOUT_MINDSPEED.phase else []

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """Return ``npu_fusion_attention``."""
        from anytron_ascend.kernels.attention import make_attention

        return make_attention(spec)

    def fused_kernel(self, name: KernelName) -> Callable[..., Any] | None:
        """Return torch_npu's fused operator, where there is one."""
        from anytron_ascend.kernels.fused import fused_kernel

        return fused_kernel(name)


def deny_torch_npu(_original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace transformers' probe for torch_npu: the answer is no."""
    return lambda *_, **__: False


_BRIDGE_WITHOUT_MINDSPEED = Patch(
    id="ascend.bridge-without-mindspeed",
    target="transformers.utils:is_torch_npu_available",
    phase=Phase.BEFORE_IMPORT,
    before="mcore_bridge",
    reason=(
        "where torch_npu is, mcore-bridge assumes MindSpeed's modules: it takes MindSpeed's defaults into the "
        "model's config and expects linear layers without Transformer Engine's interface; portable ones have it"
    ),
    upstream="mcore_bridge/config/model_config.py, _augment_mindspeed_defaults; tuners/lora.py, line 204",
    remove_when="mcore-bridge asks for MindSpeed instead of torch_npu",
    replacement="anytron_ascend.adaptors.portable:deny_torch_npu",
)
