"""The interface of an adaptor, and the adaptor ``none``: portable modules with kernels of torch_npu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron import Patch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from anytron import Diagnostic, EngineFacts, Ledger, Limit, PatchContext, Requirement, RunConfig
    from anytron.kernels import AttentionKernel, AttentionSpec, KernelName
    from anytron.sequences import AttnMask, MaskRequest, ModelInputs


class Adaptor:
    """The part of the platform that depends on how Megatron is adapted to NPUs; this base class changes nothing.

    Each method computes the result of the platform's hook or method with the same name. The defaults are for a library
    with its own modules, kernels and redirection of ``torch.cuda``.

    Attributes:
        portable_modules: Whether models are built from the portable modules.
        redirects_torch_cuda: Whether the engine redirects ``torch.cuda`` to the NPU; False if the adaptor's library
            does.
    """

    portable_modules = False
    redirects_torch_cuda = False

    def limits(self) -> Iterable[Limit]:
        """Return the features that the adaptor's library lacks."""
        return ()

    def requirements(self) -> Iterable[Requirement]:
        """Return the required packages besides torch_npu."""
        return ()

    def configure(self, config: RunConfig) -> Iterable[Diagnostic]:
        """Check that the adaptor supports the run."""
        del config
        return ()

    def runtime_env(self) -> Mapping[str, str]:
        """Return environment variables of every process, in addition to the platform's."""
        return {}

    def prepare_engine(self, facts: EngineFacts, ledger: Ledger) -> None:
        """Set process-wide state that depends on the engine."""

    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Return the patches of training ranks."""
        del phase, context
        return ()

    def build_attn_mask(self, request: MaskRequest) -> AttnMask | None:
        """Build the mask, with the mode in which the kernel reads it; None = Anytron's default mask."""
        del request
        return None

    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs | None:
        """Add process-wide state of a micro-batch to its scope; None = there is nothing to add."""
        del inputs
        return None

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel | None:
        """Return the attention kernel of portable modules; None = the default of ``anytron.kernels.attention``."""
        del spec
        return None

    def fused_kernel(self, name: KernelName) -> Callable[..., Any] | None:
        """Return the fused kernel ``name`` of portable modules; None = the default of ``anytron.kernels.fused``."""
        del name
        return None


class PortableAdaptor(Adaptor):
    """The adaptor ``none``: portable modules with torch_npu's kernels.

    Masks are Anytron's default masks. Packed sequences (thd) need no mask tensor, because the kernel gets their
    lengths; padded rows (bshd) need none if padding is on the right, because the kernel is causal. The kernel makes its
    compressed mask itself.
    """

    portable_modules = True
    redirects_torch_cuda = True

    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Keep mcore-bridge from using its code paths for MindSpeed."""
        del context
        return [_BRIDGE_WITHOUT_MINDSPEED] if phase is _BRIDGE_WITHOUT_MINDSPEED.phase else []

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """Return ``npu_fusion_attention`` as an attention kernel."""
        from anytron_ascend.kernels.attention import make_attention

        return make_attention(spec)

    def fused_kernel(self, name: KernelName) -> Callable[..., Any] | None:
        """Return torch_npu's fused operator; None if it has none."""
        from anytron_ascend.kernels.fused import fused_kernel

        return fused_kernel(name)


def deny_torch_npu(_original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace transformers' probe for torch_npu: return False."""
    return lambda *_, **__: False


_BRIDGE_WITHOUT_MINDSPEED = Patch(
    id="ascend.bridge-without-mindspeed",
    target="transformers.utils:is_torch_npu_available",
    phase=Phase.BEFORE_IMPORT,
    before="mcore_bridge",
    reason=(
        "if torch_npu is installed, mcore-bridge assumes MindSpeed's modules: it puts MindSpeed's defaults into the "
        "model's config and expects linear layers without Transformer Engine's interface, which portable layers have"
    ),
    upstream="mcore_bridge/config/model_config.py, _augment_mindspeed_defaults; tuners/lora.py, line 204",
    remove_when="mcore-bridge asks for MindSpeed instead of torch_npu",
    replacement="anytron_ascend.adaptors.adaptor:deny_torch_npu",
)
