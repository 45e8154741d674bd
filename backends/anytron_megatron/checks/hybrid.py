"""Check that a model of Mamba-2, attention and experts can be trained, and in this layout. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.models.families import FAMILIES
from anytron_megatron.models.release import HAS_MAMBA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.models.families import Family
    from anytron_megatron.options import MegatronOptions

_TENSOR, _CONTEXT = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"
_STAGES = "engine.options.virtual_pipeline_model_parallel_size"

_FIXED: Mapping[str, tuple[Any, str]] = {
    "conv_kernel": (4, "Megatron's Mamba layers convolve 4 tokens"),
    "layer_norm_epsilon": (1e-5, "the norm inside Megatron's Mamba layers adds 1e-5"),
    "use_conv_bias": (True, "the convolution of Megatron's Mamba layers has a bias"),
    "use_bias": (False, "the projections of Megatron's Mamba layers have no bias"),
    "mlp_bias": (False, "mcore-bridge builds experts without a bias"),
    "mamba_hidden_act": ("silu", "Megatron's Mamba layers compute with SiLU"),
    "mlp_hidden_act": ("relu2", "mcore-bridge builds experts with the square of ReLU"),
    "moe_latent_size": (None, "mcore-bridge reads no projections around the experts"),
    "residual_in_fp32": (False, "mcore-bridge would add in float32, and transformers ignores the setting"),
    "sliding_window": (None, "mcore-bridge would give attention a window, and transformers ignores the setting"),
    "tie_word_embeddings": (False, "mcore-bridge would tie the embeddings, and transformers ignores the setting"),
}
"""Fields of a config that must have these values: what else would be computed."""

_DENSE = {"-", "mlp"}


def hybrid_diagnostics(key: str, row: Family, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Check the installed megatron-core, the kinds of layers, and the fields that Megatron does not read.

    Args:
        key: The configuration key that names the model.
        row: The model's family.
        text: Hugging Face config of its language model.
    """
    if not row.hybrid:
        return
    if reason := _missing_in(installed_version("megatron-core")):
        yield Diagnostic(
            "error",
            key,
            f"{row.model_type} has Mamba layers, which do not run with the installed megatron-core: {reason}",
            "install megatron-core 0.19 (pip install 'megatron-core>=0.19.2,<0.20', which needs Python 3.12), or train "
            "a model without Mamba layers, for example Qwen3-MoE",
        )
        return
    # transformers takes one layer of each kind where a config names none.
    layers = text.get("hybrid_override_pattern") or text.get("layers_block_type") or _DENSE
    if _DENSE & set(layers):
        yield Diagnostic(
            "error",
            key,
            f"some layers of this {row.model_type} are dense MLPs, whose weights mcore-bridge leaves in the file",
            "train a model whose layers are Mamba, attention and experts only, such as Nemotron-3 Nano",
        )
    for name, (value, why) in _FIXED.items():
        if (found := text.get(name, value)) != value:
            yield Diagnostic(
                "error",
                key,
                f"{name} of this {row.model_type} is {found}: {why}",
                f"train a model whose {name} is {value}, as in Nemotron-3 Nano",
            )


def _missing_in(version: str) -> str:
    """Say what a release of megatron-core lacks; empty if nothing."""
    if in_range(version, HAS_MAMBA):
        return ""
    if in_range(version, "<0.18"):
        return f"{version} lacks HybridModel, of which mcore-bridge builds them"
    return f"the layers of {version} hold their convolution in a module, and mcore-bridge reads conv1d_weight"


def hybrid_layout_diagnostics(subject: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that the ranks can divide Mamba layers, and that the run trains nothing that no test compares."""
    row = FAMILIES.get(str(subject.config.get("model_type")))
    if row is None or not row.hybrid:
        return
    sizes = run.parallel.sizes()
    for name in ("mamba_num_heads", "n_groups"):
        count, ranks = subject.text.get(name) or 0, sizes.tensor * sizes.context
        if count % ranks:
            yield Diagnostic(
                "error",
                _TENSOR if count % sizes.tensor else _CONTEXT,
                f"{name} {count} cannot be split over {ranks} ranks, tensor parallel {sizes.tensor} times context "
                f"parallel {sizes.context}",
                f"use sizes whose product divides {count}",
            )
    if sizes.expert_tensor > 1:
        # mcore_bridge/model/gpts/nemotron_h.py, line 291
        yield Diagnostic(
            "error",
            "parallel.expert_tensor_parallel_size",
            f"mcore-bridge would split the up-projections of {row.model_type}'s experts as one matrix, so that a rank "
            "gets whole experts instead of a part of each",
            "set parallel.expert_tensor_parallel_size=1 and distribute the experts with "
            "parallel.expert_model_parallel_size",
        )
    if options.virtual_pipeline_model_parallel_size > 1:
        # megatron/core/models/hybrid/hybrid_layer_allocation.py, line 386
        yield Diagnostic(
            "error",
            _STAGES,
            f"Megatron builds virtual stages of {row.model_type} only from a pattern that names them, and "
            "mcore-bridge gives the pattern of the model's config",
            f"remove {_STAGES}",
        )
    if run.model.lora is not None:
        message = f"no test compares adapters of {row.model_type} with Hugging Face"
        yield Diagnostic("error", "model.lora", message, "remove model.lora")
    if subject.scores or run.critic is not None:
        # mcore_bridge/model/hybrid_model.py reads no task_type
        yield Diagnostic(
            "error",
            "critic" if run.critic is not None else subject.key,
            f"mcore-bridge gives {row.model_type} no head with one output, which critics and reward models have",
            "remove the section critic and set algorithm.advantage=grpo, or choose a reward model of another family",
        )
