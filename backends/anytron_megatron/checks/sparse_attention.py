"""Check that a model with DeepSeek sparse attention can be trained, and in this layout. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.models.families import family_of
from anytron_megatron.models.release import HAS_SPARSE_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.models.families import Family
    from anytron_megatron.options import MegatronOptions

_VARIANT = "experimental_attention_variant"
_TENSOR = "parallel.tensor_model_parallel_size"
_INDEXER_LOSS = "dsa_indexer_loss_coeff"


def sparse_diagnostics(
    key: str, row: Family, text: Mapping[str, Any], options: MegatronOptions
) -> Iterator[Diagnostic]:
    """Check the installed megatron-core, the indexer's sizes, and options that concern sparse attention.

    Args:
        key: The configuration key that names the model.
        row: The model's family.
        text: Hugging Face config of its language model.
        options: Options of the engine.
    """
    variant = f"engine.options.transformer.{_VARIANT}"
    asked = options.transformer.get(_VARIANT)
    if not row.sparse_attention:
        if asked == "dsa":
            message = f"{row.model_type} has no indexer, which DeepSeek sparse attention needs"
            yield Diagnostic("error", variant, message, f"remove {variant}")
        return
    if reason := _missing_in(installed_version("megatron-core")):
        yield Diagnostic(
            "error",
            key,
            f"{row.model_type} has DeepSeek sparse attention, which does not run with the installed megatron-core: "
            f"{reason}",
            "install megatron-core 0.19 (pip install 'megatron-core>=0.19.2,<0.20', which needs Python 3.12), or train "
            "a model without sparse attention, for example DeepSeek-V3",
        )
        return
    if _VARIANT in options.transformer and asked != "dsa":
        message = f"{row.model_type} would be trained without its sparse attention, and generated with it"
        yield Diagnostic("error", variant, message, f"remove {variant}")
    yield from _indexer(key, row, text)
    if options.transformer.get(_INDEXER_LOSS):
        yield Diagnostic(
            "error",
            f"engine.options.transformer.{_INDEXER_LOSS}",
            "Anytron freezes indexers: no test compares the gradients of this loss with its definition",
            f"remove engine.options.transformer.{_INDEXER_LOSS}",
        )


def _missing_in(version: str) -> str:
    """Say what a release of megatron-core lacks; empty if nothing."""
    if in_range(version, HAS_SPARSE_ATTENTION):
        return ""
    if in_range(version, "<0.17"):
        return f"{version} lacks fused_qk_topk_naive, which mcore-bridge's indexer imports"
    return (
        f"the sparse attention of {version} does not support packed sequences, and mcore-bridge does not support "
        "context parallelism with that sparse attention"
    )


def _indexer(key: str, row: Family, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    width, rotated = text.get("index_head_dim", 128), text.get("qk_rope_head_dim", 64)
    if width != 2 * rotated or width & (width - 1):
        yield Diagnostic(
            "error",
            key,
            f"index_head_dim is {width} and qk_rope_head_dim {rotated}: mcore-bridge rotates index_head_dim - "
            "qk_rope_head_dim entries of an indexer's head, transformers qk_rope_head_dim; and a Hadamard transform "
            "needs a power of two of entries",
            "train a model whose index_head_dim is twice qk_rope_head_dim and a power of two, as in published models",
        )
    pairs = bool(text.get("indexer_rope_interleave", False))
    if pairs != (row.model_type == "glm_moe_dsa"):
        yield Diagnostic(
            "error",
            key,
            f"indexer_rope_interleave is {pairs}, by which mcore-bridge rotates the indexer's heads; transformers "
            f"rotates the heads of {row.model_type} as if it were {not pairs}",
            f"set indexer_rope_interleave to {str(not pairs).lower()} in the config, as the published models have it",
        )
    layers = {kind for name in ("indexer_types", "index_topk_pattern") for kind in text.get(name) or ()}
    if (text.get("index_topk_freq") or 1) > 1 or layers & {"shared", "S"}:
        yield Diagnostic(
            "error",
            key,
            "some layers take the keys that an earlier layer's indexer has chosen (index_topk_freq, indexer_types), "
            "and no test compares such layers with transformers",
            "train a model with an indexer in each layer, such as GLM-5",
        )
    if not text.get("q_lora_rank", 1):
        yield Diagnostic(
            "error",
            key,
            "q_lora_rank is null, and an indexer makes its queries from the compressed ones",
            "train a model with q_lora_rank, as all published models with sparse attention have",
        )


def sparse_layout_diagnostics(subject: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check that the ranks can divide sparse attention, and that no adapters are trained."""
    row = family_of(subject.config)
    if row is None or not row.sparse_attention:
        return
    sizes = run.parallel.sizes()
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        yield Diagnostic(
            "error",
            "parallel.sequence_parallel",
            f"with {_TENSOR} above 1 mcore-bridge's sparse attention needs sequence parallelism: without it a rank's "
            "gradient of the compressed keys would cover its own heads only",
            "set parallel.sequence_parallel=true",
        )
    if run.model.lora is not None:
        yield Diagnostic(
            "error",
            "model.lora",
            "mcore-bridge's sparse attention multiplies by the weight of kv_b_proj itself, so an adapter of this layer "
            "would have no effect, and no test compares the other layers' adapters",
            "remove model.lora",
        )
