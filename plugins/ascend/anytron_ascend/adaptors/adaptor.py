"""What the platform asks of an adaptor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig
    from anytron.hooks.types import PatchContext, Requirement
    from anytron.kernels.contract import AttentionKernel, AttentionSpec, KernelName
    from anytron.masks import AttnMask, MaskRequest
    from anytron.patches import Ledger, Patch, Phase
    from anytron.sequences import ModelInputs


class Adaptor(Protocol):
    """The answers of the platform's hooks that differ between adaptors; each as the hook of its name."""

    portable_modules: bool
    """Whether models are built from the portable modules."""

    redirects_torch_cuda: bool
    """Whether the engine sends ``torch.cuda`` to the NPU; False if the adaptor does."""

    def requirements(self) -> Iterable[Requirement]:
        """Packages, besides torch_npu."""

    def configure(self, config: RunConfig) -> Iterable[Diagnostic]:
        """What the adaptor cannot do, or does differently."""

    def prepare_engine(self, config: RunConfig, ledger: Ledger) -> None:
        """Global state that depends on the engine."""

    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Changes of third-party code, in training ranks."""

    def build_attn_mask(self, request: MaskRequest) -> AttnMask | None:
        """The mask, and with it the kernel's mode."""

    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs | None:
        """Global state around a micro-batch."""

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel | None:
        """Attention of portable modules."""

    def fused_kernel(self, name: KernelName) -> Callable[..., Any] | None:
        """Fused kernels of portable modules."""
