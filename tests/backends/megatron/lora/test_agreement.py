"""Adapters trained on recorded trajectories are the same however the model is split, and the same as PEFT's."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from anytron.proof.verification.weights import stored_weights
from anytron.sequences.batch import TokenOutputs
from tests.backends.megatron.families.layouts import WITH_ADAPTERS
from tests.backends.megatron.lora.conftest import SCALING, shared_group, token_scores, weight_of

pytestmark = pytest.mark.filterwarnings(
    # peft 0.20.0 asks transformers 5.23 by an old name (peft/peft_model.py, PeftModel.__init__).
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

TP2 = {"tensor_model_parallel_size": 2}
SPLITS = {
    ("qwen3", "tp2-sp"): {"parallel": TP2},
    ("qwen3", "pp2-recomputed"): {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"recompute": "full"},
    },
    ("qwen3_moe", "ep2"): {"parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2}},
    ("deepseek_v3", "tp2-sp-ep2"): {"parallel": {**TP2, "expert_model_parallel_size": 2}},
    ("qwen3_next", "tp2-sp-ep2"): {"parallel": {**TP2, "expert_model_parallel_size": 2}},
    ("qwen3_next", "cp2"): {"parallel": {"context_parallel_size": 2}},
}
QUICK = {("qwen3", "tp2-sp"), ("qwen3_moe", "ep2"), ("qwen3_next", "cp2")}
"""The others are left to ``tox -e slow``."""
FAMILIES = [
    *("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "qwen2_5_vl"),
    *(pytest.param(name, marks=pytest.mark.families) for name in WITH_ADAPTERS),
]


def differences(one, other):
    """Largest absolute differences of log-probs and adapters, largest relative one of gradient norms."""
    assert one.adapter.keys() == other.adapter.keys()
    return {
        "log_probs": (one.log_probs - other.log_probs).abs().max().item(),
        "grad_norm": max(abs(a - b) / a for a, b in zip(one.grad_norms, other.grad_norms, strict=True)),
        "adapter": max((one.adapter[name] - other.adapter[name]).abs().max().item() for name in one.adapter),
    }


@pytest.fixture(scope="module")
def one_rank(train_adapters):
    return functools.cache(train_adapters)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("family", "split"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in SPLITS]
)
def test_a_split_agrees_with_one_rank(family, split, one_rank, train_adapters):
    found = differences(one_rank(family), train_adapters(family, **SPLITS[family, split]))

    assert max(found.values()) <= 1e-5, found


@pytest.mark.slow
def test_gradients_that_are_not_summed_over_sequence_shards_are_noticed(one_rank, train_adapters, write_extension):
    """With sequence parallelism, factors that are whole on every rank see only a part of the tokens there."""
    write_extension(
        "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        "lambda original: lambda *arguments, **options: None",
    )
    found = differences(one_rank("qwen3"), train_adapters("qwen3", **SPLITS["qwen3", "tp2-sp"]))

    assert found["log_probs"] <= 1e-5, found  # the forward pass has nothing to do with it
    assert found["grad_norm"] > 1e-3, found
    assert found["adapter"] > 1e-3, found


@pytest.mark.some(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_written_adapter_is_the_merged_model_in_peft(family, one_rank, peft_model, hf_model, recorded):
    directory = one_rank(family).directory
    with torch.no_grad():
        merged, _ = token_scores(hf_model(directory / "hf"), recorded)
        adapted, _ = token_scores(peft_model(family, directory / "adapter"), recorded)
        base, _ = token_scores(hf_model(family), recorded)

    assert (merged - adapted).abs().max() <= 1e-5
    assert (merged - base).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_itself_is_what_it_was_and_the_merged_one_adds_b_times_a(family, one_rank, tiny_family):
    trained = one_rank(family)
    before = stored_weights(tiny_family(family))
    merged = load_file(trained.directory / "merged.safetensors")
    saved = stored_weights(trained.directory / "hf")
    second_factors = {weight_of(name, before): value for name, value in trained.adapter.items() if ".lora_B." in name}
    first_factors = {weight_of(name, before): value for name, value in trained.adapter.items() if ".lora_A." in name}

    assert merged.keys() == before.keys() == saved.keys()
    for name, weight in before.items():
        assert torch.equal(merged[name], saved[name]), name
        if name in second_factors:
            delta = SCALING * (second_factors[name] @ first_factors[name])
            torch.testing.assert_close(merged[name], weight + delta, atol=1e-6, rtol=0)
        else:
            assert torch.equal(merged[name], weight), name


@pytest.mark.parametrize("split", [{}, SPLITS["qwen3", "tp2-sp"]], ids=["one rank", "tp2-sp"])
def test_one_update_is_that_of_peft_on_the_hugging_face_model(
    split, train_adapters, peft_model, random_adapter, recorded, policy_loss
):
    trained = train_adapters("qwen3", steps=1, **split, optimizer={"name": "sgd", "lr": 0.5, "clip_grad": 0.0})
    model = peft_model("qwen3", random_adapter("qwen3"), is_trainable=True)
    log_probs, entropies = token_scores(model, recorded)
    policy_loss(TokenOutputs(log_probs, entropies), recorded).loss.backward()

    torch.testing.assert_close(trained.log_probs, log_probs.detach(), atol=1e-5, rtol=0)
    parameters = {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    gradients = {}
    for name, parameter in parameters.items():  # layers that share A have one, whose gradient is the sum of theirs
        key = shared_group(name.removesuffix(".lora_A.weight")) if ".lora_A." in name else name
        gradients[key] = gradients.get(key, 0) + parameter.grad
    assert parameters.keys() == trained.adapter.keys()
    for name, parameter in parameters.items():
        key = shared_group(name.removesuffix(".lora_A.weight")) if ".lora_A." in name else name
        expected = parameter.detach() - 0.5 * gradients[key]
        torch.testing.assert_close(trained.adapter[name], expected, atol=1e-5, rtol=0)
        assert (trained.adapter[name] - parameter).abs().max() > 1e-4, name
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert trained.grad_norms[0] == pytest.approx(norm, rel=1e-5)
