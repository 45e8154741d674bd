"""The runs in which published faults change a number: those of the kit's mutants, and models with other features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conformance.runs import RUNS as OF_MUTANTS

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGITS = {
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 11,
    "pad_token_id": 12,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def of(**config: Any) -> dict[str, Any]:
    """Give the section ``model`` of a run of another family."""
    return {"model": {"config": {**DIGITS, **SMALL, **config}}}


WINDOW = of(
    model_type="gpt_oss",
    num_hidden_layers=2,
    head_dim=16,
    attention_bias=True,
    num_local_experts=4,
    num_experts_per_tok=2,
    experts_per_token=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=3,
    swiglu_limit=7.0,
    rms_norm_eps=1e-5,
    rope_theta=150000,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_type": "yarn",
        "truncate": False,
    },
)
"""gpt-oss: a window in each other layer, experts with biases."""

GEMMA = {
    "model": {
        "config": {
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                **DIGITS,
                **SMALL,
                "head_dim": 16,
                "global_head_dim": 32,
                "attention_k_eq_v": False,
                "enable_moe_block": False,
                "final_logit_softcapping": 5.0,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size_per_layer_input": 0,
                "layer_types": ["sliding_attention", "full_attention"],
                "num_global_key_value_heads": None,
                "num_kv_shared_layers": 0,
                "rope_parameters": {
                    "full_attention": {
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1000000.0,
                        "rope_type": "proportional",
                    },
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
                "sliding_window": 3,
                "use_bidirectional_attention": None,
                "use_double_wide_mlp": False,
                "vocab_size_per_layer_input": 16,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "head_dim": 16,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_key_value_heads": 2,
                "patch_size": 4,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "image_token_id": 13,
            "video_token_id": 14,
            "tie_word_embeddings": False,
        }
    }
}
"""Gemma 4: capped logits, a window in each other layer, and angles of which most are zero in the others."""
FILE = Path(__file__).with_name("two_tools.py")
TOOLS = {
    "model": {"tokenizer": f"{FILE}:tokenizer"},
    "data": {"source": f"{FILE}:prompts", "options": {"count": 64}},
    "environment": {"path": f"{FILE}:TwoTools", "max_turns": 2},
    "rollout": {"stop": []},
}
"""Conversations with tools that return two results at once."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

SUPERVISED = {
    "data": {"source": "sort_digits.py:examples"},
    "rewards": None,
    "rollout": None,
    "algorithm": {"name": "sft", "mini_batches": 1, "kl_coefficient": 0.0, "entropy_coefficient": 0.0},
}
"""Supervised fine-tuning with the right answers."""

RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **OF_MUTANTS,
    "partial-rotary": ("grpo_sort", of(model_type="glm4", head_dim=16, partial_rotary_factor=0.5)),
    "linear-rope": (
        "grpo_sort",
        of(model_type="llama", rope_scaling={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    ),
    "rotary-of-12": ("grpo_sort", of(model_type="qwen3", head_dim=12)),
    "tp2-sp": (
        "grpo_sort",
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    ),
    "tp2-moe": (
        "grpo_moe",
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}},
    ),
    "dp2": ("grpo_sort", {"parallel": {"data_parallel_size": 2}}),
    "ep2": ("grpo_moe", {"parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2}}),
    "pp2-tied": (
        "grpo_sort",
        {
            "model": {"config": {"tie_word_embeddings": True}},
            "parallel": {"pipeline_model_parallel_size": 2},
        },
    ),
    "window": ("grpo_sort", WINDOW),
    "yarn, latent": (
        "grpo_mla",
        {
            "model": {
                "config": {
                    "rope_scaling": {
                        "beta_fast": 32,
                        "beta_slow": 1,
                        "factor": 4.0,
                        "mscale": 0.707,
                        "mscale_all_dim": 1.0,
                        "original_max_position_embeddings": 16,
                        "rope_type": "yarn",
                    }
                }
            }
        },
    ),
    "bshd, row by row": (
        "grpo_sort",
        {
            "engine": {"sequence_format": "bshd", "max_tokens_per_micro_batch": 16},
            "rollout": {"max_new_tokens": 10, "temperature": 1.0},
        },
    ),
    "delta-net, tp2": ("grpo_gated_delta_net", {"parallel": {"tensor_model_parallel_size": 2}}),
    "adapters": ("grpo_sort", {"model": {"lora": {"rank": 4}}}),
    "gemma": ("grpo_sort", GEMMA),
    "four-norms": ("grpo_sort", of(model_type="glm4", head_dim=16, partial_rotary_factor=0.5)),
    "moe-bshd": ("grpo_moe", {"engine": {"sequence_format": "bshd"}}),
    "dual-clip": ("grpo_sort", {"algorithm": {"dual_clip": 1.01}}),
    "gspo": ("grpo_sort", {"algorithm": {"loss": "gspo", "aggregation": "sequence-mean"}}),
    "tp2-whole": (
        "grpo_sort",
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": False}},
    ),
    "replay": ("grpo_mla", {"model": {"config": {"num_hidden_layers": 3}}, "rollout": {"replay_routing": True}}),
    "lora-ep2": (
        "grpo_moe",
        {
            "model": {"lora": {"rank": 4}},
            "parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2},
        },
    ),
    "dp2-small": ("grpo_sort", {"parallel": {"data_parallel_size": 2}, "engine": {"max_tokens_per_micro_batch": 16}}),
    "bfloat16-small": ("grpo_sort", {"model": {"dtype": "bfloat16"}, "engine": {"max_tokens_per_micro_batch": 16}}),
    "images-tp2": ("grpo_count_shapes", {"parallel": {"tensor_model_parallel_size": 2}}),
    "long": (
        "grpo_sort",
        {
            "model": {"config": {"max_position_embeddings": 1024}},
            "rollout": {"min_new_tokens": 280, "max_new_tokens": 280},
            "engine": {"max_tokens_per_micro_batch": 1024},
        },
    ),
    "sequence-balance": (
        "grpo_moe",
        {
            "engine": {
                "sequence_format": "bshd",
                "options": {
                    "transformer": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
                },
            }
        },
    ),
    "few-prompts": ("grpo_sort", {"data": {"options": {"count": 9}}, "trainer": {"total_steps": 3}}),
    "images": ("grpo_count_shapes", {"data": {"options": {"count": 4}}}),
    "lora": ("grpo_sort", {"model": {"lora": {"rank": 4}}}),
    "tools": ("grpo_calculator", TOOLS),
    "tools-and-routes": (
        "grpo_calculator",
        {
            **TOOLS,
            "model": {**TOOLS["model"], "config": EXPERTS},
            "rollout": {"stop": [], "replay_routing": True},
        },
    ),
    "no-empty-response": ("grpo_sort", {"rollout": {"min_new_tokens": 1}}),
    "warm-up": (
        "grpo_sort",
        {"optimizer": {"schedule": "cosine", "warmup_steps": 1}, "trainer": {"total_steps": 3}},
    ),
    "uneven": ("grpo_sort", {"parallel": {"data_parallel_size": 2}, "engine": {"max_tokens_per_micro_batch": 28}}),
    "sft": ("grpo_sort", SUPERVISED),
    "close-rewards": ("grpo_sort", {"rewards": [{"function": "sort_digits.py:reward", "weight": 0.001}]}),
}
