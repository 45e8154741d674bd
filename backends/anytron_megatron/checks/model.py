"""What of a model Megatron, or mcore-bridge, would refuse in the workers, or compute wrongly. Light to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.errors import did_you_mean
from anytron_megatron.models.families import FAMILIES, proved
from anytron_megatron.models.weight_files import weight_faults
from anytron_megatron.options import MegatronOptions, transformer_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.models.families import Family

_JUDGED_EXPERTS = 2
"""Experts by which DeepSeek-V3 judges a group (https://arxiv.org/abs/2412.19437, section 2.1.2: K_r / M = 8 / 4)."""

_ROPE_TYPES = {"default", "mrope", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding that are held against Hugging Face by a test."""


def model_diagnostics(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Judge a model by its config, and the files of its weights by their headers.

    Args:
        config: The run.
        model: The Hugging Face config, whole; empty if there is none.
    """
    options = MegatronOptions.of(config)
    yield from _transformer(options, model)
    if not model:
        return
    where = "model.config.model_type" if config.model.path is None else "model.path"
    family, text = str(model.get("model_type")), model.get("text_config", model)
    row = FAMILIES.get(family)
    if row is None:
        yield Diagnostic(
            "error",
            where,
            f"mcore-bridge does not know the model type {family}, so it cannot be trained",
            did_you_mean(family, FAMILIES) or f"it knows {', '.join(sorted(FAMILIES))}",
        )
        return
    if row.sparse_attention or options.transformer.get("experimental_attention_variant") == "dsa":
        yield Diagnostic(
            "error",
            where,
            "DeepSeek sparse attention does not run: mcore-bridge's indexer imports fused_qk_topk_naive, which "
            "megatron-core has from 0.17 on, and refuses packed sequences and context parallelism; its rotation is "
            "the CUDA extension fast_hadamard_transform",
            "train a model without it, for example DeepSeek-V3",
        )
    elif not row.proof:
        yield Diagnostic(
            "warning",
            where,
            f"mcore-bridge builds {family}, and no test of Anytron compares it with Hugging Face",
            "compare it with anytron verify before you train",
        )
    yield from _routing(options, where, family, text)
    yield from _rotary(where, row, text)
    yield from _prediction(config, options, row, text)
    if config.model.path is not None:
        faults = weight_faults(Path(config.model.path), model)
        yield from (Diagnostic("error", "model.path", fault.why, fault.fix) for fault in faults)


def _transformer(options: MegatronOptions, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    if not options.transformer:
        return
    known = transformer_fields(latent_attention=bool(model.get("text_config", model).get("kv_lora_rank")))
    for name in options.transformer:
        if name not in known:
            yield Diagnostic(
                "error",
                f"engine.options.transformer.{name}",
                "Megatron's transformer config has no field of that name",
                did_you_mean(name, known) or "remove it",
            )


def _routing(options: MegatronOptions, where: str, family: str, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Refuse DeepSeek-V3 without the name of its routing: Megatron reads it, and transformers has it built in."""
    if family != "deepseek_v3" or not text.get("n_routed_experts", 1):
        return
    scoring = options.transformer.get("moe_router_score_function", text.get("scoring_func"))
    if scoring != "sigmoid":
        found = "lacks scoring_func" if scoring is None else f"says scoring_func {scoring}"
        yield Diagnostic(
            "error",
            where,
            f"the model's config {found}: Megatron would route by softmax, and DeepSeek-V3 routes by sigmoid",
            'add "scoring_func": "sigmoid" and "topk_method": "noaux_tc", as the published config.json has them',
        )
    if text.get("topk_method", "noaux_tc") != "noaux_tc":
        yield Diagnostic(
            "error",
            where,
            f"the model's config says topk_method {text['topk_method']}, which Megatron does not read: it would choose "
            "experts as noaux_tc does",
            'DeepSeek-V3 has "topk_method": "noaux_tc"',
        )
    chosen, groups = text.get("num_experts_per_tok", 8), text.get("topk_group", 4)
    # megatron/core/transformer/moe/moe_utils.py, group_limited_topk; transformers' DeepseekV3TopkRouter
    if text.get("n_group", 8) > 1 and chosen // groups != _JUDGED_EXPERTS:
        yield Diagnostic(
            "error",
            where,
            f"Megatron judges a group of experts by its best {chosen // groups} (num_experts_per_tok // topk_group), "
            f"and DeepSeek-V3 by its best {_JUDGED_EXPERTS}: tokens would go to other experts",
            "such a model cannot be trained; DeepSeek-V3 itself has 8 // 4",
        )
    if chosen == 1 or not text.get("norm_topk_prob", True):
        yield Diagnostic(
            "error",
            where,
            f"num_experts_per_tok {chosen}, norm_topk_prob {text.get('norm_topk_prob', True)}: behind a sigmoid, "
            "Megatron makes the weights of the chosen experts add up to 1 if there are several, and never otherwise",
            "such a model cannot be trained",
        )


def _rotary(where: str, family: Family, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    part = parameters.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if family.rotates_whole_heads and part != 1.0:
        yield Diagnostic(
            "error",
            where,
            f"partial_rotary_factor {part}: Megatron would rotate that part of a head, and transformers' "
            f"{family.model_type} ignores it",
            "remove it from the model's config",
        )
    if kind in ("dynamic", "longrope"):
        yield Diagnostic(
            "error",
            where,
            f"rotary embeddings of type {kind} depend on the longest sequence of a batch, so that the same tokens have "
            "other log-probs in the rollout than in training",
            "give rope_parameters of a fixed type, for example yarn",
        )
    elif kind not in _ROPE_TYPES:
        yield Diagnostic(
            "error",
            where,
            f"rotary embeddings of type {kind} were never compared with Hugging Face's",
            f"known to agree: {', '.join(sorted(_ROPE_TYPES))}",
        )


def _prediction(
    config: RunConfig, options: MegatronOptions, family: Family, text: Mapping[str, Any]
) -> Iterator[Diagnostic]:
    key = "engine.options.mtp_loss_coefficient"
    if options.mtp_loss_coefficient == 0.0:
        return
    if "MTP" not in family.proof:
        yield Diagnostic(
            "error",
            key,
            f"multi-token prediction of {family.model_type} was never compared with its definition",
            f"set it to 0 (known to agree: {proved('MTP')})",
        )
    elif not text.get("num_nextn_predict_layers"):
        yield Diagnostic("error", key, "the model has no multi-token prediction modules", "set it to 0")
    elif config.model.config is not None:
        yield Diagnostic(
            "error",
            key,
            "a model that starts from random weights has no multi-token prediction modules: transformers makes none",
            "set it to 0, or give a model.path",
        )
