"""Adaptor ``mindspeed``: MindSpeed's modules and patches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from anytron import AnytronError, Diagnostic, Feature, HookContractError, Limit, NeutralDefaults, Requirement
from anytron.sequences import AttnMask, MaskKind
from anytron_ascend.adaptors.adaptor import Adaptor
from anytron_ascend.mindspeed.installation import find_installation, model_diagnostics
from anytron_ascend.mindspeed.patches import CAUSAL, FULL, PATCHES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from anytron import EngineFacts, Ledger, Patch, PatchContext, Phase, RunConfig
    from anytron.sequences import MaskRequest, ModelInputs
    from anytron_ascend.options import MindSpeedOptions


class MindSpeedAdaptor(Adaptor):
    """MindSpeed's modules and patches; MindSpeed itself imports ``torch_npu.contrib.transfer_to_npu``.

    Args:
        options: ``platform.options.mindspeed``.
    """

    def __init__(self, options: MindSpeedOptions) -> None:
        self._options = options

    def limits(self) -> Iterable[Limit]:
        """Decline features that MindSpeed's attention would silently ignore.

        ``MindSpeedTEDotProductAttention`` (mindspeed/te/pytorch/attention/dot_product_attention) reads neither
        ``window_size`` nor ``softmax_type`` of the model's config, and its kernel is called without sinks.
        """
        return (
            Limit(Feature.SLIDING_WINDOW, "MindSpeed's attention is causal over whole sequences"),
            Limit(Feature.ATTENTION_SINKS, "MindSpeed calls its attention kernel without sinks"),
        )

    def requirements(self) -> Iterable[Requirement]:
        """Return the packages that MindSpeed imports.

        MindSpeed itself may have no metadata: :meth:`configure` looks for it.
        """
        remedy = "pip install einops scipy protobuf: MindSpeed imports them"
        return [Requirement(package, "", remedy) for package in ("einops", "scipy", "protobuf")]

    def configure(self, config: RunConfig) -> Iterable[Diagnostic]:
        """Check that MindSpeed is installed and matches this Megatron, and that it can train the run's model."""
        try:
            find_installation()
        except AnytronError as error:
            yield Diagnostic(
                "error", "platform.options.adaptor", f"{error.what.removesuffix('.')}; {error.why}", error.fix
            )
        yield from model_diagnostics(config)

    def prepare_engine(self, facts: EngineFacts, ledger: Ledger) -> None:
        """Let MindSpeed apply its patches for this engine, with all of MindSpeed's arguments set."""
        from anytron_ascend.mindspeed.process_state import default_arguments, engine_arguments, forget_engine, repatch

        forget_engine()
        repatch(engine_arguments(default_arguments(), facts.sizes, self._options), ledger)

    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Return the patch that imports MindSpeed, then fixes where it calls kernels against their documentation."""
        del context
        return [patch for patch in PATCHES if patch.phase is phase]

    def build_attn_mask(self, request: MaskRequest) -> AttnMask:
        """Build Anytron's default mask, with the mode in which MindSpeed's kernel reads it.

        If the mask has no tensor, MindSpeed makes the compressed causal mask, a triangle, itself.

        Raises:
            HookContractError: The model is not causal or has a sliding window.
        """
        traits = request.traits
        if not traits.causal or traits.window is not None:
            raise HookContractError(
                "MindSpeed's attention cannot compute this model's mask.",
                where="platform.options.adaptor",
                why="it supports causal masks of whole sequences only, and the model "
                f"{'has a sliding window' if traits.causal else 'is not causal'}",
                fix="set platform.options.adaptor=none",
            )
        from anytron_ascend.kernels.mask_reader import read_mindspeed  # imports torch

        mask = dataclasses.replace(NeutralDefaults().build_attn_mask(request), reader=read_mindspeed)
        if mask.kind is MaskKind.FULL_4D:
            return dataclasses.replace(mask, kernel_mode=FULL, tensor=_seeing_itself(mask.tensor))
        return dataclasses.replace(mask, kernel_mode=CAUSAL)

    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs:
        """Return the inputs with a scope in which MindSpeed's globals hold the sequence lengths and positions."""
        from anytron.sequences import scopes  # imports torch, which finding the platform must not
        from anytron_ascend.mindspeed.process_state import sequence_scope

        return dataclasses.replace(inputs, scope=scopes.combine(inputs.scope, sequence_scope(inputs.layout)))


def _seeing_itself(mask: Tensor | None) -> Tensor | None:
    """Let every row see itself, padding too: the kernel does not define a row that sees nothing."""
    if mask is None:
        return None
    seeing = mask.clone()
    seeing.diagonal(dim1=-2, dim2=-1).fill_(False)
    return seeing
