"""Rollout that must be equal to training to the bit: what it refuses, and its experts against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.base.errors import EngineError
from anytron.device.loading import open_session
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import default_kernel
from anytron_rollout.checks import diagnostics
from anytron_rollout.invariant import InvariantModel
from anytron_rollout.invariant_experts import ROUTERS, rebind_experts
from tests.backends.rollout.conftest import run_config

EXPERTS = {"num_experts": 8}


@pytest.mark.parametrize(
    ("fields", "dtype", "tensor", "message"),
    [
        ({"model_type": "qwen3_moe", **EXPERTS}, "bfloat16", 1, None),
        ({"model_type": "ernie4_5"}, "float32", 1, None),
        ({"model_type": "gpt_oss", **EXPERTS}, "float32", 1, "no form of a gpt_oss's experts"),
        (
            {"model_type": "qwen3_5_moe", "text_config": {"model_type": "own", **EXPERTS}},
            "float32",
            1,
            "a own's experts",
        ),
        (
            {"model_type": "q", "thinker_config": {"text_config": {"model_type": "omni", **EXPERTS}}},
            "float32",
            1,
            "a omni's",
        ),
        ({"model_type": "ernie4_5"}, "bfloat16", 1, "rotates the heads of an ernie4_5 in float32"),
        ({"model_type": "qwen3"}, "float32", 2, "of tensor-parallel ranks, and a rollout process has no parts"),
        ({"model_type": "qwen3_moe", **EXPERTS}, "float32", -2, "of expert-tensor-parallel ranks"),
    ],
)
def test_a_difference_that_is_certain_or_untested_is_refused(fields, dtype, tensor, message):
    config = run_config({"config": fields, "dtype": dtype, "tokenizer": "sort_digits.py:tokenizer"})
    name = f"{'expert_' * (tensor < 0)}tensor_{'model_' * (tensor > 0)}parallel_size"
    parallel = config.parallel.model_copy(update={name: abs(tensor)})
    close = config.model_copy(update={"parallel": parallel})
    bitwise = close.model_copy(update={"engine": config.engine.model_copy(update={"on_policy": "bitwise"})})

    found = list(diagnostics(bitwise, None))

    assert [one.key for one in found] == ["engine.on_policy"] * (message is not None)
    assert all(message in one.message and "rollout.engine=megatron" in one.fix for one in found)
    assert list(diagnostics(close, None)) == []


@pytest.mark.parametrize(
    "fields", [{"text_config": 5}, {"thinker_config": 5}, {"thinker_config": {"text_config": [1]}}]
)
def test_a_malformed_config_is_left_to_the_check_that_reports_it(fields):
    config = run_config({"config": {"model_type": "qwen3", **fields}, "tokenizer": "sort_digits.py:tokenizer"})
    engine = config.engine.model_copy(update={"on_policy": "bitwise"})
    assert list(diagnostics(config.model_copy(update={"engine": engine}), None)) == []


SIZES = {
    "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "num_experts_per_tok": 4,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
SIGMOID = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
CHANGES = {
    "deepseek_v3": {**SIGMOID, **LATENT, "num_key_value_heads": 4, "routed_scaling_factor": 2.5},
    "dots1": {**SIGMOID, "routed_scaling_factor": 2.5},
    "glm4_moe": SIGMOID,
    "glm4_moe_lite": {**SIGMOID, **LATENT, "num_key_value_heads": 4},
    "hy_v3": {"num_experts": 8, "router_scaling_factor": 2.8},
    "minimax_m2": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8, "norm_topk_prob": False},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
}


@pytest.mark.parametrize("model_type", ROUTERS)
def test_experts_compute_what_those_of_transformers_do(model_type):
    """Equal but for rounding; bits are compared with Megatron's in tests/backends/megatron/generation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **CHANGES[model_type]}))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name and "norm" not in name:
            torch.nn.init.normal_(value.data, std=0.3)
    tokens = torch.randint(16, (3, 29))
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        rebind_experts(model, open_session("cpu").hooks, "cpu")
        found = model(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mixtral", {"num_local_experts": 4}), ("qwen3_moe", {"num_experts": 8, "hidden_act": "gelu"})],
)
def test_other_experts_are_an_error_and_stay_as_they_are(model_type, changes):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **changes}))

    with pytest.raises(EngineError, match="cannot compute this model's experts in Megatron's order"):
        rebind_experts(model, open_session("cpu").hooks, "cpu")
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_platform_s_kernel_that_transformers_does_not_call_is_an_error():
    class OwnNorm:
        def fused_kernel(self, name, spec):
            return (lambda *_: None) if name is KernelName.RMS_NORM else default_kernel(name, spec)

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    with pytest.raises(EngineError, match="computes rms_norm with a kernel that transformers does not call"):
        InvariantModel(model, OwnNorm(), "cpu", 64)
