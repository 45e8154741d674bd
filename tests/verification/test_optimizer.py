"""Moves of weights that are compared by hand: what an update should do, written out, and what each fault does."""

from __future__ import annotations

import pytest
import torch

from anytron.config.running import OptimizerSection
from anytron.kernels.fused import adam
from anytron.proof.verification.updates import VISIBLE, compare_moves, compare_norms

SECTION = OptimizerSection(**VISIBLE)
NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = (16, 8), (8, 8), (8,)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in zip(NAMES, shapes, strict=True)}


def gradients():
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in weights().items()}
    found[NAMES[0]][3:7] = 0.0  # tokens that do not occur
    return found


def first_adam_update(weight, gradient, *, decay=True, corrected=True, lr=SECTION.lr):
    """From a state of nothing: the bias correction leaves of both moments what they are averages of."""
    first, second = (1 - SECTION.beta1) * gradient, (1 - SECTION.beta2) * gradient.square()
    if corrected:
        first, second = first / (1 - SECTION.beta1), second / (1 - SECTION.beta2)
    kept = weight * (1 - lr * SECTION.weight_decay) if decay and weight.ndim > 1 else weight
    return kept - lr * first / (second.sqrt() + SECTION.eps)


def compare(after, *, section=SECTION, dtype="float32", before=None, given=None):
    return compare_moves("check", [before or weights(), after], [given or gradients()], section=section, dtype=dtype)


def updated(**fault):
    return {name: first_adam_update(weight, gradients()[name], **fault) for name, weight in weights().items()}


def test_adam_moves_weights_as_it_is_written():
    result = compare(updated())
    assert result.status == "passed", result.detail
    assert result.detail.startswith("3 weights after one update with lr 0.01 and weight decay 0.1, the worst is ")


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [({"decay": False}, 2), ({"corrected": False}, 3), ({"lr": 0.02}, 3)],
    ids=["without-decay", "without-bias-correction", "twice-as-far"],
)
def test_a_fault_of_the_kernel_fails_and_the_kernel_is_named(fault, wrong):
    result = compare(updated(**fault))
    assert result.status == "failed"
    assert result.detail.startswith(f"{wrong} of 3 weights after one update")
    assert "differ from torch's AdamW with the same gradients" in result.detail
    assert result.detail.endswith("look at the adam kernel")


def test_norms_that_decay_too_fail():
    after = updated()
    after[NAMES[2]] = after[NAMES[2]] - SECTION.lr * SECTION.weight_decay * weights()[NAMES[2]]
    result = compare(after)
    assert result.status == "failed"
    assert "1 of 3 weights" in result.detail
    assert "model.norm.weight by" in result.detail


@pytest.mark.parametrize(("decays", "status"), [(False, "passed"), (True, "failed")])
def test_biases_of_several_experts_in_one_tensor_do_not_decay(decays, status):
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    bias, gradient = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    after = first_adam_update(bias, gradient, decay=decays)
    result = compare({name: after}, before={name: bias}, given={name: gradient})
    assert result.status == status, result.detail


def test_weights_that_stay_are_counted():
    after = {**updated(), NAMES[1]: weights()[NAMES[1]]}
    result = compare(after)
    assert result.status == "failed"
    assert "1 of them have not moved" in result.detail


def test_a_move_to_nowhere_fails():
    after = {**updated(), NAMES[1]: weights()[NAMES[1]] * torch.nan}
    assert compare(after).status == "failed"


def test_a_gradient_of_rounding_error_may_move_weights_to_either_side():
    """Adam divides by the gradient's size, so that what rounding leaves of a 0 moves a weight as far as any other."""
    given = gradients()
    given[NAMES[1]] = torch.full_like(given[NAMES[1]], 1e-7)
    after = updated()
    after[NAMES[1]] = first_adam_update(weights()[NAMES[1]], -given[NAMES[1]])
    assert compare(after, given=given).status == "passed"


def test_sgd_adds_the_decay_to_the_gradient():
    section = SECTION.model_copy(update={"name": "sgd"})
    before = {name: 50.0 * weight for name, weight in weights().items()}
    after, without = {}, {}
    for name, weight in before.items():
        without[name] = weight - section.lr * gradients()[name]
        after[name] = without[name] - section.lr * section.weight_decay * weight * (weight.ndim > 1)
    assert compare(after, section=section, before=before).status == "passed"
    result = compare(without, section=section, before=before)
    assert result.status == "failed"
    assert "2 of 3 weights" in result.detail
    assert "torch's SGD" in result.detail


def test_bfloat16_weights_are_rounded_after_the_update():
    before = {name: weight.bfloat16() for name, weight in weights().items()}
    after = {name: first_adam_update(weight.float(), gradients()[name]).bfloat16() for name, weight in before.items()}
    assert compare(after, before=before, dtype="bfloat16").status == "passed"
    slow = {
        name: first_adam_update(weight.float(), gradients()[name], lr=0.008).bfloat16()
        for name, weight in before.items()
    }
    assert compare(slow, before=before, dtype="bfloat16").status == "failed"


def two_updates(*, forgets):
    """Weights before and after each of two updates by the Adam kernel; it may keep no second moments."""
    weight = weights()[NAMES[1]]
    kept, moments = [{NAMES[1]: weight.clone()}], [torch.zeros_like(weight), torch.zeros_like(weight)]
    given = [{NAMES[1]: gradients()[NAMES[1]]}, {NAMES[1]: 3.0 * gradients()[NAMES[1]].roll(1, 0)}]
    for step, gradient in enumerate(given, start=1):
        settings = {"lr": SECTION.lr, "beta1": SECTION.beta1, "beta2": SECTION.beta2, "eps": SECTION.eps}
        adam(
            [weight],
            [gradient[NAMES[1]]],
            [moments[0]],
            [moments[1].clone() if forgets else moments[1]],
            step=step,
            weight_decay=SECTION.weight_decay,
            decoupled=True,
            bias_correction=True,
            **settings,
        )
        kept.append({NAMES[1]: weight.clone()})
    return kept, given


def test_what_the_optimizer_does_not_keep_shows_in_the_second_update():
    kept, given = two_updates(forgets=True)
    assert compare_moves("check", kept[:2], given[:1], section=SECTION, dtype="float32").status == "passed"
    result = compare_moves("check", kept, given, section=SECTION, dtype="float32")
    assert result.status == "failed"
    assert "1 of 1 weights after 2 updates" in result.detail
    kept, given = two_updates(forgets=False)
    assert compare_moves("check", kept, given, section=SECTION, dtype="float32").status == "passed"


def test_the_norm_by_which_gradients_are_clipped_is_compared():
    assert compare_norms("check", [(2.0, 2.00001), (1.0, 1.0)], dtype="float32").status == "passed"
    result = compare_norms("check", [(2.0, 2.0), (1.0, 1.4)], dtype="float32")
    assert result.status == "failed"
    assert result.detail == "gradients are clipped by a norm of 1, but the norm of the exported ones is 1.4"


def test_each_update_has_its_own_rate():
    """The second update has half the rate of the first; a rate that stays is noticed."""
    given, states, rates = [gradients(), gradients()], [weights()], (SECTION.lr, SECTION.lr / 2)
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights().items()}
    groups = [{"params": [one], "weight_decay": 0.1 if one.ndim > 1 else 0.0} for one in parameters.values()]
    optimizer = torch.optim.AdamW(groups, betas=(SECTION.beta1, SECTION.beta2), eps=SECTION.eps)
    for found, rate in zip(given, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in parameters.items():
            parameter.grad = found[name].clone()
        optimizer.step()
        states.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    settings = {"section": SECTION, "dtype": "float32"}
    assert compare_moves("check", states, given, **settings, rates=rates).status == "passed"
    assert compare_moves("check", states, given, **settings).status == "failed"
