"""verl's own workers, unmodified, on a processor: against transformers, against verl's layouts, on several ranks."""

from __future__ import annotations

import pytest
import torch

from plugins.verl.tests.expected import of_transformers, responses

FORMATS = ("thd", "bshd")
NAMES = [f"verl.{when}process-{what}-engine" for what in ("thd", "bshd") for when in ("pre", "post")]


@pytest.fixture(scope="session")
def one(model, ranks):
    """What one rank finds, in both formats."""
    return ranks("compared.py", model)


@pytest.fixture(scope="session")
def parallel(model, ranks):
    """What the first of two ranks finds, by the dimension that they share."""
    found = {}

    def of(dimension):
        if dimension not in found:
            found[dimension] = ranks("compared.py", model, **{dimension: 2})
        return found[dimension]

    return of


@pytest.mark.parametrize("sequence_format", FORMATS)
def test_log_probs_are_those_of_transformers(model, one, sequence_format):
    torch.testing.assert_close(responses(one[sequence_format]["log_probs"]), of_transformers(model), atol=1e-5, rtol=0)


def test_the_comparison_would_notice_another_rotary_base(model, one):
    other = of_transformers(model, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (responses(one["thd"]["log_probs"]) - other).abs().max() > 1e-2


def test_verl_has_our_platform_and_its_own_engines_on_it(one):
    assert one["platform"] == "AnytronDevice"
    assert one["stack"] == "cpu"
    assert {one[each]["engine"] for each in FORMATS} == {"LanguageModelEngine"}
    assert {one[each]["critic"] for each in FORMATS} == {"ValueModelEngine"}


@pytest.mark.parametrize("dimension", ["one", "tensor", "context"])
@pytest.mark.parametrize("sequence_format", FORMATS)
def test_layouts_are_verls_on_every_real_token(one, parallel, sequence_format, dimension):
    found = (one if dimension == "one" else parallel(dimension))[sequence_format]
    for drawn in found["differing"]:
        counted = {what: count for what, count in drawn.items() if what not in ("slots", "without a label")}
        assert set(counted.values()) == {0}, drawn
        assert drawn["slots"] > 20
        assert drawn["without a label"] <= 6  # one for each sequence: verl rolls its first token there


@pytest.mark.parametrize("sequence_format", FORMATS)
def test_no_branch_on_the_device_is_reached(one, sequence_format):
    assert one[sequence_format]["asked for an NPU"] == 0
    assert one[sequence_format]["asked by verl's own"] > 0  # whom the count does see


def test_the_ledger_says_what_is_replaced(one):
    assert [one["patches"][name][0] for name in NAMES] == ["applied"] * 4
    assert one["replaced"]


def test_leaving_undoes_everything(one):
    assert one["torch"]
    assert one["transformer_engine"] == []
    assert one["still replaced"] == []


@pytest.mark.parametrize("dimension", ["tensor", "context"])
@pytest.mark.parametrize("sequence_format", FORMATS)
def test_two_ranks_equal_one(one, parallel, sequence_format, dimension):
    alone, shared = one[sequence_format], parallel(dimension)[sequence_format]
    torch.testing.assert_close(responses(shared["log_probs"]), responses(alone["log_probs"]), atol=1e-5, rtol=0)
    for algorithm in ("ppo", "grpo"):
        for figure in ("loss", "grad_norm"):
            assert shared[algorithm][figure] == pytest.approx(alone[algorithm][figure], rel=1e-3, abs=1e-5)
    assert shared["ppo"]["critic_grad_norm"] == pytest.approx(alone["ppo"]["critic_grad_norm"], rel=1e-3)
    torch.testing.assert_close(responses(shared["after"]), responses(alone["after"]), atol=1e-3, rtol=0)


def test_packed_equals_padded(one):
    packed, padded = one["thd"], one["bshd"]
    torch.testing.assert_close(responses(packed["log_probs"]), responses(padded["log_probs"]), atol=1e-5, rtol=0)
    for algorithm in ("ppo", "grpo"):
        assert packed[algorithm]["grad_norm"] == pytest.approx(padded[algorithm]["grad_norm"], rel=1e-3)


def test_a_script_that_names_only_verl_takes_steps_of_ppo_and_grpo(model, ranks):
    found = ranks("user.py", model, "thd", "bfloat16")
    assert found["engine"] == "LanguageModelEngine"
    assert min(found[each]["grad_norm"] for each in ("ppo", "grpo")) > 0
    moved = (responses(found["after"]) - responses(found["log_probs"])).abs()
    assert moved.max() > 1e-2
    torch.testing.assert_close(responses(found["log_probs"]), of_transformers(model), atol=0.1, rtol=0)
