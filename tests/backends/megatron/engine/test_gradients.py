"""Each parameter's gradient is Hugging Face's, in every family and layout, and a wrong one is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from anytron.proof.verification import hugging_face
from anytron.proof.verification.gradients import check_gradients
from anytron.run.trainer.updates import UpdatePlan
from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model
from tests.backends.megatron.lora.conftest import LORA, write_random_adapter

TP2, PP2, DP2 = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "pipeline_model", "data"))
EP2 = {**DP2, "expert_model_parallel_size": 2}
SHARDED = {"optimizer": {"name": "adam"}, "engine": {"distributed_optimizer": True}}
IN_BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}
CASES = {
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "qwen3, bshd, recomputed": ("qwen3", {"engine": {"sequence_format": "bshd", "recompute": "full"}}),
    "qwen3, temperature 0.5": ("qwen3", {"rollout": {"temperature": 0.5}}),
    "qwen3, tp2": ("qwen3", {"parallel": TP2}),
    "qwen3, tp2, no sequence parallelism": ("qwen3", {"parallel": {**TP2, "sequence_parallel": False}}),
    "qwen3, cp2": ("qwen3", {"parallel": {"context_parallel_size": 2}}),
    "qwen3, pp2, vpp2": (
        "qwen3",
        {"parallel": PP2, "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}}},
    ),
    "qwen3, dp2": ("qwen3", {"parallel": DP2}),
    "qwen3, dp2, sharded optimizer": ("qwen3", {"parallel": DP2, **SHARDED}),
    "qwen3, dp2, sharded optimizer, buckets": (
        "qwen3",
        {"parallel": DP2, **SHARDED, "engine": {**SHARDED["engine"], "options": IN_BUCKETS}},
    ),
    "qwen3_tied, pp2": ("qwen3_tied", {"parallel": PP2}),
    "qwen3_moe, balanced": (
        "qwen3_moe",
        {"engine": {"options": {"transformer": {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 1.0}}}},
    ),
    "qwen3_moe, ep2, sharded optimizer": ("qwen3_moe", {"parallel": EP2, **SHARDED}),
    "qwen3_moe, replayed": ("qwen3_moe", {"engine": {"options": {"router_replay": "old-log-probs"}}}),
    "deepseek_v3, tp2": ("deepseek_v3", {"parallel": TP2}),
    "qwen3_next": ("qwen3_next", {}),
}


@pytest.fixture
def compare(ranks, tiny_family, recorded):
    """Make the check of an engine of a family, or of the model in a directory."""

    def check(family_or_directory="qwen3", batch=recorded, /, **sections):
        directory = tiny_family(family_or_directory) if isinstance(family_or_directory, str) else family_or_directory
        workers, config = ranks.engine(directory, **sections)
        return check_gradients("hf-gradients", config, workers, batch)

    return check


@pytest.mark.some(6)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_hugging_face(case, compare):
    family, sections = CASES[case]
    found = compare(family, **sections)
    assert found.status == "passed", found
    assert found.difference <= 2e-5, found
    assert "not compared" not in found.detail


def test_latent_norms_have_the_epsilon_of_the_config(compare, tmp_path):
    """transformers gives them 1e-6 whatever the config says; Megatron, vLLM and SGLang take the config's."""
    found = compare(write_tiny_model("deepseek_v3", tmp_path / "model", num_hidden_layers=2, rms_norm_eps=1e-3))
    assert found.status == "passed", found
    assert found.difference <= 2e-5, found


def test_the_padding_token_is_trained_like_any_other(compare, recorded, tmp_path):
    """transformers gives its row no gradient from inputs; in SmolLM2 it is the token that ends each message."""
    token = int(recorded.tokens[0])
    found = compare(write_tiny_model("llama", tmp_path / "model", pad_token_id=token))
    assert found.status == "passed", found
    assert found.difference <= 2e-5, found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_in_bfloat16_they_are_as_near_as_its_rounding_allows(family, compare):
    found = compare(family, model={"dtype": "bfloat16"})
    assert found.status == "passed", found
    assert found.tolerance == 0.16


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_latent_attention_whose_sequences_are_whole_on_each_rank(sequence_format, compare, tmp_path):
    """Experts need sequence parallelism with tensor parallelism; a model without them does not."""
    model = write_tiny_model("deepseek_v3", tmp_path / "dense", first_k_dense_replace=4)
    config = json.loads((model / "config.json").read_text())
    del config["n_routed_experts"]
    (model / "config.json").write_text(json.dumps(config))
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    found = compare(model, parallel=parallel, engine={"sequence_format": sequence_format})
    assert found.status == "passed", found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_with_images(family, compare, recorded_images):
    found = compare(family, recorded_images)
    assert found.status == "passed", found
    assert "not compared" not in found.detail


def test_frozen_parts_are_counted(compare, recorded_images):
    found = compare("qwen3_vl", recorded_images, model={"freeze": ["vision_tower", "aligner"]})
    assert found.status == "passed", found
    assert "47 parameters" in found.detail
    assert "39 not compared: frozen (model.freeze)" in found.detail


def test_modules_of_multi_token_prediction_are_counted(compare, tmp_path):
    model = write_tiny_model("deepseek_v3", tmp_path / "model")
    turn_last_layers_into_prediction_modules(model, 1)
    found = compare(model, engine={"options": {"mtp_loss_coefficient": 0.3, "mtp_detach": False}})
    assert found.status == "passed", found
    assert "of multi-token prediction, which transformers does not compute" in found.detail


@pytest.mark.parametrize(
    ("family", "split"),
    [("qwen3", {}), ("qwen3", TP2), ("qwen3_moe", EP2), ("deepseek_v3", {})],
    ids=["qwen3", "qwen3, tp2", "qwen3_moe, ep2", "deepseek_v3"],
)
def test_adapters_gradients_follow_from_those_of_the_weights(family, split, compare, tiny_family, tmp_path):
    adapter = write_random_adapter(tiny_family(family), tmp_path / "adapter")
    found = compare(family, model={"lora": {**LORA, "path": str(adapter)}}, parallel=split)
    assert found.status == "passed", found
    assert "the run trains adapters only (model.lora)" in found.detail
    assert "unknown" not in found.detail


def test_new_adapters_have_a_gradient_in_one_factor_only(compare):
    found = compare(model={"lora": LORA})
    assert found.status == "passed", found


def test_a_model_that_does_not_fit_into_the_host_is_skipped_with_the_numbers(compare, monkeypatch):
    monkeypatch.setattr(hugging_face, "available_memory", lambda: 1000)
    found = compare()
    assert found.status == "skipped"
    assert "billion parameters need" in found.detail


SABOTEUR = """
import torch
from anytron import hookimpl
from anytron.kernels import fused
from anytron.kernels.log_prob import make_log_prob


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Plugin:
    name = "sabotage"
    fault = {fault!r}

    @hookimpl
    def fused_kernel(self, name):
        if self.fault == "doubled norm" and name == "rms_norm":
            return lambda *arguments: Doubled.apply(fused.rms_norm(*arguments))

    @hookimpl
    def log_prob_kernel(self, spec):
        kernel = make_log_prob(spec)

        def log_prob(hidden, weight, labels, temperature, group):
            weight = weight.detach() if self.fault == "output layer" else weight
            log_probs, entropy = kernel(hidden, weight, labels, temperature, group)
            return log_probs, entropy.detach() if self.fault == "entropy" else entropy

        return log_prob

    @hookimpl
    def postprocess_output(self, values, layout):
        if self.fault == "everything":
            return layout.unpack(values).detach().requires_grad_()
"""


@pytest.fixture
def sabotage(install_plugin, compare):
    """Make the check of an engine with a fault."""

    def check(fault, **sections):
        install_plugin(SABOTEUR.format(fault=fault))
        found = compare(**sections)
        assert found.status == "failed", found
        return found

    return check


@pytest.mark.slow
def test_a_doubled_gradient_of_rms_norm_is_named_with_its_factor(sabotage):
    found = sabotage("doubled norm")
    assert "the first is model.norm.weight, which is 2 times Hugging Face's" in found.detail
    assert found.difference >= 1.0


def test_a_log_prob_kernel_without_gradient_for_the_output_layer_is_named(sabotage):
    found = sabotage("output layer")
    assert "1 of 47 parameters" in found.detail
    assert "the first is lm_head.weight, which is zero" in found.detail
    assert "the log_prob kernel's backward pass" in found.detail


@pytest.mark.slow
def test_an_entropy_without_gradient_is_noticed(sabotage):
    found = sabotage("entropy")
    assert "the first is lm_head.weight" in found.detail
    assert found.difference >= 1e-2


@pytest.mark.slow
def test_a_postprocess_that_detaches_everything_is_noticed(sabotage):
    found = sabotage("everything")
    assert "47 of 47 parameters" in found.detail
    assert "no gradient reaches any parameter: look at postprocess_output" in found.detail


def test_what_is_not_summed_over_ranks_is_named(write_extension, compare):
    write_extension(
        "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        "lambda original: lambda *arguments, **options: None",
    )
    found = compare(parallel=TP2)
    assert found.status == "failed", found
    assert "_norm.weight by" in found.detail


@pytest.mark.slow
def test_a_parameter_that_is_not_trained_is_missing(write_extension, compare):
    write_extension(
        "anytron_megatron.engine:freeze",
        "lambda original: lambda chunks, *rest:"
        " [chunk.decoder.final_layernorm.weight.requires_grad_(False) for chunk in chunks]",
    )
    found = compare()
    assert found.status == "failed", found
    assert "1 of 47 parameters" in found.detail
    assert "the first is model.norm.weight, which is missing" in found.detail


def test_gradients_change_nothing_in_the_engine(ranks, tiny_family, recorded, policy_loss):
    """The weights, the expert biases and the next update are what they are without."""
    workers, config = ranks.engine(tiny_family("deepseek_v3"))
    plan = UpdatePlan.from_config(config, workers.topology[0])
    expected = [workers.update(recorded, plan, policy_loss)["grad_norm"] for _ in range(2)]
    workers, config = ranks.engine(tiny_family("deepseek_v3"))
    check_gradients("hf-gradients", config, workers, replace(recorded, temperature=0.7))
    found = [workers.update(recorded, plan, policy_loss)["grad_norm"] for _ in range(2)]
    assert found == expected


def test_the_loss_has_every_term():
    loss = hugging_face.LOSS.algorithm
    assert min(loss.kl_coefficient, loss.entropy_coefficient) > 0
    ratios = hugging_face._OLD.exp()
    assert (ratios < 1 - loss.clip_low).any()
    assert (ratios > 1 + loss.clip_high).any()
    bounds = torch.tensor([1 - loss.clip_low, 1 + loss.clip_high])
    assert (ratios[:, None] - bounds).abs().min() > 0.05
