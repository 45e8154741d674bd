"""Gradients that are compared by hand: which are wrong, how, and which comes first on the way back from the loss."""

import pytest
import torch

from anytron.proof.verification.gradients import adapter_gradients, compare_gradients, frozen_reasons, may_be_frozen

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def random_gradients():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 3, generator=generator) for name in NAMES}


def compare(found, expected, dtype="float32", **skipped):
    return compare_gradients("check", found, expected, dtype=dtype, skipped=skipped, what="parameters")


def test_equal_gradients_pass_and_what_is_left_out_is_counted():
    result = compare(random_gradients(), random_gradients(), frozen=3, unknown=0)
    assert (result.status, result.difference, result.tolerance) == ("passed", 0.0, pytest.approx(1e-4))
    assert result.detail == "6 parameters, the worst is model.embed_tokens.weight; 3 not compared: frozen"


@pytest.mark.parametrize(("forward", "tolerance"), [(0.0, 1e-4), (5e-7, 1e-4), (2.4e-5, 2.4e-3), (1.0, 1e-2)])
def test_gradients_may_differ_by_more_where_log_probs_do(forward, tolerance):
    found = random_gradients()
    found["model.norm.weight"] *= 1.002
    result = compare_gradients(
        "check", found, random_gradients(), dtype="float32", skipped={}, what="parameters", forward=forward
    )
    assert result.tolerance == pytest.approx(tolerance)
    assert result.status == ("passed" if tolerance > 2e-3 else "failed")


@pytest.mark.parametrize(
    ("broken", "words", "advice"),
    [
        ("lm_head.weight", "is zero", "the log_prob kernel's backward pass, for the weight"),
        ("model.norm.weight", "is 2 times Hugging Face's", "for the hidden states, and at rms_norm's"),
        ("model.layers.1.mlp.down_proj.weight", "is missing", "the kernel that computes with it"),
        ("model.layers.0.self_attn.q_proj.weight", "is off by", "the kernel that computes with it"),
        ("model.layers.0.input_layernorm.weight", "is not finite", "the kernel that computes with it"),
        ("model.embed_tokens.weight", "has shape (3, 4), not (4, 3)", "the kernel that computes with it"),
    ],
)
def test_a_wrong_gradient_fails_and_its_place_is_named(broken, words, advice):
    """All that lies further from the loss is wrong too, as it is in a real fault, and by more."""
    found = random_gradients()
    original = found[broken]
    for name in NAMES[: NAMES.index(broken)]:
        found[name] = found[name] * 50.0
    found[broken] = {
        "is zero": original * 0.0,
        "is 2 times Hugging Face's": original * 2.0,
        "is off by": original + torch.eye(4, 3),
        "is not finite": original * torch.nan,
        "has shape (3, 4), not (4, 3)": original.t(),
    }.get(words, original)
    if words == "is missing":
        del found[broken]
    result = compare(found, random_gradients())
    assert result.status == "failed"
    assert f"{NAMES.index(broken) + 1} of 6 parameters differ" in result.detail
    assert f"the first is {broken}, which {words}" in result.detail
    assert advice in result.detail


def test_a_gradient_that_is_rounding_error_may_be_another_one_but_a_small_one_may_not_be_zero():
    expected = random_gradients()
    expected["model.layers.0.self_attn.k_proj.bias"] = torch.full((4,), 1e-8)
    expected["model.layers.0.self_attn.v_proj.bias"] = torch.full((4,), 1e-4)
    found = {name: gradient.clone() for name, gradient in expected.items()}
    found["model.layers.0.self_attn.k_proj.bias"] *= -1.0
    assert compare(found, expected, dtype="bfloat16").status == "passed"
    found["model.layers.0.self_attn.v_proj.bias"] *= 0.0
    result = compare(found, expected, dtype="bfloat16")
    assert result.status == "failed"
    assert "v_proj.bias, which is zero" in result.detail


@pytest.mark.parametrize("gradients", [{}, {"lm_head.weight": torch.zeros(2)}], ids=["none", "zero"])
def test_nothing_to_compare_is_no_success(gradients):
    assert compare(gradients, gradients).status == "failed"


def test_only_frozen_parts_may_lack_gradients():
    assert may_be_frozen("model.visual.blocks.0.attn.qkv.weight", ["vision_tower"])
    assert not may_be_frozen("model.visual.blocks.0.attn.qkv.weight", ["language_model"])
    assert may_be_frozen("model.language_model.layers.0.mlp.up_proj.weight", ["language_model"])
    assert not may_be_frozen("lm_head.weight", [])
    assert may_be_frozen("model.layers.0.self_attn.indexer.wk.weight", [])


def test_indexers_are_not_counted_as_frozen_by_the_run():
    counts = frozen_reasons({"model.layers.0.self_attn.indexer.wk.weight", "model.norm.weight", "lm_head.weight"})
    assert counts == {
        "frozen (model.freeze)": 2,
        "of indexers of sparse attention, which choose keys and have no gradient": 1,
    }


def test_adapters_gradients_are_those_of_autograd():
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(2, 5, generator=generator, requires_grad=True)
    seconds = {name: torch.randn(3, 2, generator=generator, requires_grad=True) for name in ("q_proj", "k_proj")}
    upstream = {name: torch.randn(3, 5, generator=generator) for name in seconds}
    sum((0.5 * second @ shared * upstream[name]).sum() for name, second in seconds.items()).backward()
    layer = "base_model.model.model.layers.0.self_attn"
    adapters = {f"{layer}.{name}.lora_A.weight": shared.detach().clone() for name in seconds}
    adapters |= {f"{layer}.{name}.lora_B.weight": second.detach() for name, second in seconds.items()}
    adapters |= {f"{layer}.gone.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"}

    weights = {f"model.layers.0.self_attn.{name}.weight": gradient for name, gradient in upstream.items()}
    found = adapter_gradients(adapters, weights, 0.5)

    assert found.keys() == {name for name in adapters if "gone" not in name}
    for name, second in seconds.items():
        torch.testing.assert_close(found[f"{layer}.{name}.lora_A.weight"], shared.grad)
        torch.testing.assert_close(found[f"{layer}.{name}.lora_B.weight"], second.grad)
