"""Translate the run's configuration into MindSpeed-LLM's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

    from anytron import RunConfig
    from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions

SPEC = ("mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec")
"""MindSpeed-LLM's layer of RMSNorm, grouped-query attention, and gated feed-forward or experts; the name is that of
the first family that it was written for."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {"qk_layernorm": True},
}
"""Model types that the translation was tested with, and arguments that do not follow from their configs."""
WITH_EXPERTS = ("qwen3_moe",)

CAUSAL, BAND = 2, 4
"""``sparse_mode`` of ``npu_fusion_attention`` with the compressed triangle: left-up causal, and a band.
MindSpeed-LLM's attention uses the band for packed sequences, whatever the argument says, with a window that is longer
than any sequence (``custom_dot_product_attention.py``)."""


def translate(config: RunConfig, model: PretrainedConfig, options: MindSpeedLlmOptions) -> dict[str, Any]:
    """Translate the configuration into MindSpeed-LLM's arguments, by name; all others keep their defaults.

    Raises:
        ConfigError: The engine lacks the model's family or a feature of the run; or ``options.arguments`` sets an
            argument that follows from other keys.
    """
    arguments = {
        **_model(model),
        **_precision(config),
        **_parallel(config, model, options),
        **_attention(config),
        **_optimizer(config, options),
        **_recompute(config, options),
        **(_experts(model, options, config.model.dtype) if model.model_type in WITH_EXPERTS else {}),
        **_kernels(options),
    }
    if owned := sorted(arguments.keys() & options.arguments.keys()):
        raise ConfigError(
            "Arguments of MindSpeed-LLM are set twice.",
            where=", ".join(f"engine.options.arguments.{name}" for name in owned),
            why=f"other keys of the configuration set them: {', '.join(f'{k}={arguments[k]!r}' for k in owned)}",
            fix="remove them from engine.options.arguments; to change a value, set the key that it comes from",
        )
    return {**arguments, **options.arguments}


def check_names(arguments: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check that every name in ``arguments`` is in ``known``, the arguments that MindSpeed-LLM has.

    Raises:
        ConfigError: MindSpeed-LLM does not have one of the arguments.
    """
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"MindSpeed-LLM has no argument {name}.",
                where=f"engine.options.arguments.{name}",
                why="the argument parsers of MindSpeed-LLM, MindSpeed and Megatron do not declare it",
                fix=did_you_mean(name, known) or "remove it",
            )


def _model(model: PretrainedConfig) -> dict[str, Any]:
    family = model.model_type
    if family not in FAMILIES:
        raise _refusal(
            f"models of type {family}", "model", f"it builds {', '.join(FAMILIES)}", "set engine.name=megatron"
        )
    rope = model.rope_parameters
    if rope["rope_type"] != "default":
        raise _refusal(
            f"rotary embeddings of type {rope['rope_type']}", "model", "it was tested with the default type only"
        )
    if getattr(model, "use_sliding_window", None):
        raise _refusal("sliding-window attention", "model", "its packed attention is causal over whole sequences")
    if getattr(model, "mlp_bias", None) or getattr(model, "attention_bias", None):
        raise _refusal("biases in linear layers", "model", "its layer specification has no biases")
    if model.hidden_act != "silu":
        raise _refusal(f"the activation function {model.hidden_act}", "model", "its layers are gated by silu")
    heads = model.num_attention_heads
    return {
        "transformer_impl": "transformer_engine",
        "spec": list(SPEC),
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": heads,
        "kv_channels": getattr(model, "head_dim", None) or model.hidden_size // heads,
        "group_query_attention": True,
        "num_query_groups": model.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "seq_length": model.max_position_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": model.rms_norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": int(rope["rope_theta"]),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **FAMILIES[family],
    }


def _precision(config: RunConfig) -> dict[str, Any]:
    return {
        "bf16": config.model.dtype == "bfloat16",
        # Needs Apex.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "npu_deterministic": config.engine.deterministic,
        "seed": config.trainer.seed,
    }


def _parallel(config: RunConfig, model: PretrainedConfig, options: MindSpeedLlmOptions) -> dict[str, Any]:
    sizes = config.parallel.sizes()
    if sizes.context > 1:
        raise _refusal("context parallelism", "parallel.context_parallel_size", "no algorithm for it was tested")
    if model.num_key_value_heads % sizes.tensor:
        raise _refusal(
            f"{model.num_key_value_heads} key/value heads on {sizes.tensor} ranks",
            "parallel.tensor_model_parallel_size",
            "its attention does not replicate heads",
            f"use a size that divides {model.num_key_value_heads}",
        )
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": 1,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.sequence_parallel,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": -(-model.vocab_size // sizes.tensor) * sizes.tensor,
        "make_vocab_size_divisible_by": 1,
        "variable_seq_lengths": True,
        "use_ascend_mc2": options.parallel.ascend_mc2,
        # The trainer divides the run into micro-batches; these two only have to be valid.
        "micro_batch_size": 1,
        "global_batch_size": sizes.data,
    }


def _attention(config: RunConfig) -> dict[str, Any]:
    packed = config.engine.sequence_format == "thd"
    return {
        "use_flash_attn": True,
        "attention_mask_type": "causal",
        # Packed sequences: attention and positions begin anew with each.
        "reset_attention_mask": packed,
        "reset_position_ids": packed,
        "shape_order": "TND" if packed else "SBH",
        "sparse_mode": CAUSAL,
    }


def _optimizer(config: RunConfig, options: MindSpeedLlmOptions) -> dict[str, Any]:
    section = config.optimizer
    return {
        "optimizer": section.name,
        "optimizer_selection": options.optimizer.adam,
        "use_distributed_optimizer": config.engine.distributed_optimizer,
        "lr": section.lr,
        "min_lr": section.min_lr,
        "weight_decay": section.weight_decay,
        "adam_beta1": section.beta1,
        "adam_beta2": section.beta2,
        "adam_eps": section.eps,
        "clip_grad": section.clip_grad,
        "train_iters": config.trainer.total_steps * config.algorithm.epochs * config.algorithm.mini_batches,
    }


def _recompute(config: RunConfig, options: MindSpeedLlmOptions) -> dict[str, Any]:
    chosen = options.recompute
    if chosen.activation_function and config.engine.recompute != "none":
        raise ConfigError(
            "Activation functions can be recomputed only with engine.recompute=none.",
            where="engine.options.recompute.activation_function",
            why=f"engine.recompute is {config.engine.recompute}",
            fix="set engine.recompute=none, or remove engine.options.recompute.activation_function",
        )
    full = config.engine.recompute == "full"
    if not full and (without_effect := sorted(chosen.model_fields_set & {"method", "num_layers"})):
        raise ConfigError(
            "Options of full recomputation are set, but full recomputation is off.",
            where=", ".join(f"engine.options.recompute.{name}" for name in without_effect),
            why=f"engine.recompute is {config.engine.recompute}",
            fix="set engine.recompute=full, or remove these options",
        )
    return {
        "recompute_granularity": None if config.engine.recompute == "none" else config.engine.recompute,
        "recompute_method": chosen.method if full else None,
        "recompute_num_layers": chosen.num_layers if full else None,
        "recompute_activation_function": chosen.activation_function,
    }


def _experts(model: PretrainedConfig, options: MindSpeedLlmOptions, dtype: str) -> dict[str, Any]:
    if getattr(model, "mlp_only_layers", None) or getattr(model, "decoder_sparse_step", 1) != 1:
        raise _refusal("layers without experts between layers with experts", "model", "it builds all layers alike")
    if options.moe.grouped_gemm and dtype != "bfloat16":
        raise ConfigError(
            "Grouped matrix products need bfloat16.",
            where="engine.options.moe.grouped_gemm",
            why=f"Megatron refuses other types (megatron/training/arguments.py, validate_args); model.dtype is {dtype}",
            fix="set model.dtype=bfloat16, or engine.options.moe.grouped_gemm=false",
        )
    return {
        "num_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "norm_topk_prob": model.norm_topk_prob,
        # Probabilities are those among all experts where they are not normalized among the chosen ones.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss" if options.moe.aux_loss_coefficient else "none",
        "moe_aux_loss_coeff": options.moe.aux_loss_coefficient,
        "moe_token_dispatcher_type": options.moe.token_dispatcher,
        "moe_grouped_gemm": options.moe.grouped_gemm,
        "use_fused_moe_token_permute_and_unpermute": options.moe.fused_permutation,
    }


def _kernels(options: MindSpeedLlmOptions) -> dict[str, Any]:
    return {
        "use_fused_rotary_pos_emb": options.model.fused_rotary_embedding,
        "use_fused_swiglu": options.model.fused_swiglu,
        "use_fused_rmsnorm": options.model.fused_rms_norm,
        "attention_softmax_in_fp32": options.model.softmax_in_fp32,
    }


def _refusal(
    what: str, where: str, why: str, fix: str = "set engine.name=megatron, which supports more"
) -> ConfigError:
    return ConfigError(f"The engine mindspeed_llm does not support {what}.", where=where, why=why, fix=fix)
