"""Adaptor ``mindspeed_llm``: MindSpeed-LLM's models, for the training engine of the same name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from anytron import AnytronError, ConfigError, Diagnostic, NeutralDefaults, Requirement
from anytron_ascend.adaptors.adaptor import Adaptor
from anytron_ascend.mindspeed_llm.arguments import BAND, CAUSAL, translate
from anytron_ascend.mindspeed_llm.installation import MEGATRON, PACKAGES, find_installation
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions
from anytron_ascend.mindspeed_llm.patches import PATCHES
from anytron_megatron import optimizer_diagnostics, split_diagnostics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from anytron import Patch, PatchContext, Phase, RunConfig
    from anytron.sequences import AttnMask, MaskRequest, ModelInputs


class MindSpeedLlmAdaptor(Adaptor):
    """MindSpeed-LLM on top of MindSpeed; both import ``torch_npu.contrib.transfer_to_npu`` themselves."""

    def requirements(self) -> Iterable[Requirement]:
        """Return the packages that MindSpeed-LLM and its weights need; :meth:`configure` finds MindSpeed-LLM."""
        pinned = f"pip install --no-deps {PACKAGES}"
        imported = "pip install einops protobuf scipy six: MindSpeed, MindSpeed-LLM and Megatron-LM import them"
        return [
            Requirement("megatron-core", f"=={MEGATRON}", pinned),
            Requirement("mbridge", ">=0.15.1,<0.16", pinned),
            *(Requirement(package, "", imported) for package in ("einops", "protobuf", "scipy", "six")),
        ]

    def configure(self, config: RunConfig) -> Iterable[Diagnostic]:
        """Check that MindSpeed-LLM is installed and supports the run."""
        try:
            find_installation()
        except AnytronError as error:
            yield Diagnostic("error", "engine.name", f"{error.what.removesuffix('.')}; {error.why}", error.fix)
        yield from _unsupported(config)
        yield from optimizer_diagnostics(config)
        try:
            model = _try_translation(config)
        except AnytronError as error:
            yield Diagnostic("error", error.where, f"{error.what.removesuffix('.')}; {error.why}", error.fix)
        else:
            yield from split_diagnostics(config, model)

    def runtime_env(self) -> Mapping[str, str]:
        """Set the variable that Megatron's ``validate_args`` requires for tensor and context parallelism."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def patch_model(self, phase: Phase, context: PatchContext) -> Iterable[Patch]:
        """Return the patch that imports MindSpeed-LLM, and a patch of its code that reads packed sequences."""
        del context
        return [patch for patch in PATCHES if patch.phase is phase]

    def build_attn_mask(self, request: MaskRequest) -> AttnMask:
        """Return the neutral default's mask with the kernel's sparse mode (``sparse_mode=N``) as ``kernel_mode``.

        MindSpeed-LLM makes the compressed causal mask that the kernel reads in this mode; it is not in the result.
        """
        mode = BAND if request.format == "thd" else CAUSAL
        mask = NeutralDefaults().build_attn_mask(request)
        return dataclasses.replace(mask, kernel_mode=f"sparse_mode={mode}")

    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs:
        """Return the inputs with a scope in which globals of both packages hold the sequence lengths and positions."""
        from anytron.sequences import scopes  # imports torch, which finding the platform must not
        from anytron_ascend.mindspeed.process_state import sequence_scope
        from anytron_ascend.mindspeed_llm.process_state import scope_of

        if inputs.layout.format == "bshd":
            return inputs
        scope = scopes.combine(inputs.scope, sequence_scope(inputs.layout), scope_of(inputs.layout))
        return dataclasses.replace(inputs, scope=scope)


def _try_translation(config: RunConfig) -> Mapping[str, Any]:
    """Translate the configuration as training ranks will; return the model's Hugging Face config."""
    from anytron.engines import load_hf_config

    options = MindSpeedLlmOptions.model_validate(config.engine.options)
    model = load_hf_config(config.model)
    policy = translate(config, model, options)
    given: Mapping[str, Any] = model.to_dict()
    if config.critic is None or config.critic.path is None:
        return given
    section = config.model.model_copy(update={"path": config.critic.path, "config": None})
    critic = translate(config, load_hf_config(section), options)
    if differing := sorted(name for name in policy if policy[name] != critic.get(name)):
        raise ConfigError(
            "The critic's model differs from the policy's.",
            where="critic.path",
            why=f"MindSpeed-LLM has one set of arguments per process, and these differ: {', '.join(differing)}",
            fix="use a critic with the same config.json as the policy, or remove critic.path",
        )
    return given


def _unsupported(config: RunConfig) -> Iterator[Diagnostic]:
    """Refuse settings of other engines that this engine would silently ignore."""
    if config.model.freeze:
        yield Diagnostic(
            "error",
            "model.freeze",
            "the engine mindspeed_llm cannot freeze parts of a model",
            "set engine.name=megatron, or remove model.freeze",
        )
