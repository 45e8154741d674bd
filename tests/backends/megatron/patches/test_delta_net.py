"""Gated DeltaNet layers on two and four ranks: Hugging Face's, whatever padding holds and wherever it stands."""

import math

import pytest

from anytron.device.patches.plan import in_range, installed_version
from anytron_conformance.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.mcore,
    pytest.mark.skipif(not installed_version("mcore-bridge"), reason="mcore-bridge needs megatron-core 0.16 or later"),
]
LAYOUTS = ("sp", "no sp")


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp2 cp2"])
def facts(request, run_program, tmp_path_factory):
    path = tmp_path_factory.mktemp("delta_net")
    model = write_tiny_model("qwen3_next_heads", path / "model")
    return run_program("delta_net.py", str(model), world=request.param, tmp_path=path)


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("content", ["", ", anything", ", nan"])
def test_each_row_is_its_sequence_alone_and_padding_is_zero(layout, side, content, facts):
    found = facts["patched"][f"{layout}, {side}{content}"]
    assert found["padding's output"] == found["padding's gradient"] == 0, found
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_sequences_are_each_sequence_alone(layout, facts):
    assert facts["patched"][f"{layout}, packed"]["all"] < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_the_mask_padding_gets_in(layout, facts):
    left, nan = (facts["without the mask"][f"{layout}, {case}"] for case in ("left, anything", "right, nan"))
    assert left["output"] > 1e-3
    assert left["padding's output"] > 1e-3
    assert math.isnan(nan["input norm"])


def test_without_its_patch_a_norm_has_another_gradient(facts):
    """Measured on mcore-bridge 1.6.5: the first norm's is twice as large, the second's is half of the heads'."""
    for layout, wrong, right in (("sp", "input norm", "output norm"), ("no sp", "output norm", "input norm")):
        found = facts["without the gradients"][layout]
        assert found[wrong] > 1e-3, found
        assert max(found["output"], found["input"], found[right]) < 1e-6, found


def test_a_layer_that_does_not_know_its_padding_says_so(facts):
    assert "outside its micro-batch's scope" in facts["no scope"]
    assert "no linear_attn_mask" in facts["no map"]
    assert "(3, 7)" in facts["another shape"]


def test_the_patches_are_applied(facts):
    applied = {f"megatron.gated-delta-net-{name}": "applied" for name in ("padding", "context", "gradients", "kernels")}
    if not in_range(installed_version("megatron-core"), "<0.18"):  # which has the exchange of heads itself
        applied["megatron.gated-delta-net-context"] = "skipped"
    assert {row["id"]: row["outcome"] for row in facts["report"]} == applied
