"""From the configuration to MindSpeed-LLM's arguments."""

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from anytron.base.errors import ConfigError
from anytron.config.schema import RunConfig
from anytron_ascend.mindspeed_llm.arguments import check_names, translate
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions

QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000},
)  # fmt: skip
QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, max_position_embeddings=40960, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000},
)  # fmt: skip

SCRIPT_8B = {
    "num_layers": 36, "hidden_size": 4096, "ffn_hidden_size": 12288, "num_attention_heads": 32, "kv_channels": 128,
    "group_query_attention": True, "num_query_groups": 8, "padded_vocab_size": 151936, "rotary_base": 1000000,
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True, "qk_layernorm": True, "use_flash_attn": True,
    "make_vocab_size_divisible_by": 1, "masked_softmax_fusion": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "use_fused_rotary_pos_emb": True, "use_fused_swiglu": True, "use_fused_rmsnorm": True, "bf16": True,
    "attention_softmax_in_fp32": True, "gradient_accumulation_fusion": False, "use_distributed_optimizer": True,
    "spec": ["mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec"], "use_rotary_position_embeddings": True,
}  # fmt: skip
"""What MindSpeed-LLM 26.1.0 sets in examples/mcore/qwen3/pretrain_qwen3_8b_4K_ptd.sh, by argument."""
SCRIPT_30B = {
    "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_grouped_gemm": True,
    "norm_topk_prob": True, "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_query_groups": 4,
    "kv_channels": 128,
}  # fmt: skip
"""And in examples/mcore/qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd.sh."""


def translated(model=QWEN3_8B, options=None, dtype="bfloat16", **sections):
    known = {
        "model": {"path": "unused", "dtype": dtype},
        "data": {"source": "unused"},
        "rewards": [{"function": "unused"}],
    }
    config = RunConfig.model_validate({**known, **sections})
    return translate(config, model, MindSpeedLlmOptions.model_validate(options or {}))


def test_qwen3_8b_as_in_the_script_of_mindspeed_llm():
    found = translated()
    assert {name: found[name] for name in SCRIPT_8B} == SCRIPT_8B
    assert "num_experts" not in found


def test_qwen3_30b_a3b_as_in_the_script_of_mindspeed_llm():
    found = translated(QWEN3_30B)
    assert {name: found[name] for name in SCRIPT_30B} == SCRIPT_30B
    assert found["moe_router_load_balancing_type"] == "none"
    assert found["moe_token_dispatcher_type"] == "alltoall"


def test_families_differ_where_their_configs_do_not_say():
    assert translated(Qwen2Config())["add_qkv_bias"]
    assert "add_qkv_bias" not in translated(LlamaConfig())
    assert "qk_layernorm" not in translated(Qwen2Config())
    assert translated(Qwen2Config(hidden_size=64, num_attention_heads=4))["kv_channels"] == 16
    assert not translated(Qwen2Config(tie_word_embeddings=True))["untie_embeddings_and_output_weights"]


def test_sizes():
    sizes = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 8,
        "expert_model_parallel_size": 16,
    }
    found = translated(QWEN3_30B, parallel=sizes)
    assert {name: found[name] for name in sizes if name != "data_parallel_size"} == {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 16,
    }
    assert (found["sequence_parallel"], found["expert_tensor_parallel_size"], found["global_batch_size"]) == (
        True,
        1,
        8,
    )


def test_the_vocabulary_is_padded_to_the_tensor_parallel_size():
    found = translated(Qwen3Config(vocab_size=97), parallel={"tensor_model_parallel_size": 2})
    assert (found["vocab_size"], found["padded_vocab_size"]) == (97, 98)


@pytest.mark.parametrize(("layout", "order", "reset"), [("thd", "TND", True), ("bshd", "SBH", False)])
def test_packed_sequences_and_rows(layout, order, reset):
    found = translated(engine={"sequence_format": layout})
    assert (found["shape_order"], found["reset_attention_mask"], found["reset_position_ids"]) == (order, reset, reset)


def test_recomputation():
    assert translated()["recompute_granularity"] is None
    full = translated(engine={"recompute": "full"}, options={"recompute": {"method": "block", "num_layers": 4}})
    assert [full[f"recompute_{name}"] for name in ("granularity", "method", "num_layers")] == ["full", "block", 4]
    with pytest.raises(ConfigError, match=r"only with engine\.recompute=none"):
        translated(engine={"recompute": "full"}, options={"recompute": {"activation_function": True}})


def test_options_of_full_recomputation_without_it_are_refused():
    with pytest.raises(ConfigError, match="but full recomputation is off") as caught:
        translated(options={"recompute": {"num_layers": 4}})
    assert caught.value.where == "engine.options.recompute.num_layers"


def test_the_optimizer():
    found = translated(
        optimizer={"lr": 1e-4, "min_lr": 1e-5, "weight_decay": 0.1},
        trainer={"total_steps": 7},
        algorithm={"epochs": 2, "mini_batches": 3},
        options={"optimizer": {"adam": "fused_torch_adamw"}},
    )
    names = ("lr", "min_lr", "weight_decay", "train_iters", "optimizer_selection")
    assert [found[name] for name in names] == [1e-4, 1e-5, 0.1, 42, "fused_torch_adamw"]


def test_probabilities_among_all_experts_unless_they_are_normalized():
    assert not translated(QWEN3_30B)["moe_router_pre_softmax"]
    assert translated(Qwen3MoeConfig(norm_topk_prob=False))["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    ("model", "sections", "what"),
    [
        (Qwen3NextConfig(), {}, "models of type qwen3_next"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), {}, "type linear"),
        (LlamaConfig(attention_bias=True), {}, "biases"),
        (LlamaConfig(hidden_act="gelu"), {}, "gelu"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), {}, "layers without experts"),
        (QWEN3_8B, {"parallel": {"context_parallel_size": 2}}, "context parallelism"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(model, sections, what):
    with pytest.raises(ConfigError, match=f"does not support .*{what}"):
        translated(model, **sections)


def test_grouped_products_of_float32_are_refused():
    with pytest.raises(ConfigError, match="need bfloat16"):
        translated(QWEN3_30B, dtype="float32")


def test_further_arguments_are_passed_on_unless_they_follow_from_the_rest():
    assert translated(options={"arguments": {"swap_attention": True}})["swap_attention"] is True
    with pytest.raises(ConfigError, match="are set twice") as caught:
        translated(options={"arguments": {"num_layers": 2}})
    assert "engine.options.arguments.num_layers" in caught.value.where


def test_names_are_checked_against_the_parser():
    with pytest.raises(ConfigError, match="did you mean swap_attention"):
        check_names({"swap_attn": True}, {"swap_attention": False})
