"""Mamba layers: Hugging Face's, whatever padding holds and wherever it stands, and with packed sequences."""

from types import SimpleNamespace

import pytest
import torch

from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.models.release import HAS_MAMBA
from anytron_megatron.patches.mamba import GroupNorm, as_shards, in_order
from tests.backends.megatron.families.published import write_published_model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0)])
def test_the_norm_is_hugging_faces(dtype, tolerance):
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

    theirs = NemotronHRMSNormGated(12, group_size=4, eps=1e-5).to(dtype)
    ours = GroupNorm(12, eps=1e-5, group_size=4, norm_before_gate=False, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for norm in (ours, theirs):
        norm.weight.data.copy_(torch.linspace(-1, 2, 12))
    x = torch.randn(5, 2, 12, generator=generator).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)


def test_packed_sequences_are_put_in_order_and_back():
    """Rank 0 of 2 holds the first and the last quarter of each sequence."""
    packed = SimpleNamespace(cu_seqlens_q_padded=None, cu_seqlens_q=torch.tensor([0, 4, 12], dtype=torch.int32))
    by_rank = torch.tensor([0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9])[:, None]
    ordered = in_order(None)(by_rank, 2, packed)
    assert ordered.flatten().tolist() == list(range(12))
    assert torch.equal(as_shards(None)(ordered, 2, packed), by_rank)


def test_rows_are_megatrons_affair():
    assert in_order(lambda rows, size: (rows, size))("rows", 2) == ("rows", 2)
    assert as_shards(lambda rows, size: (rows, size))("rows", 2) == ("rows", 2)


@pytest.fixture(scope="module")
def facts(run_program, tmp_path_factory):
    path = tmp_path_factory.mktemp("mamba")
    return run_program("mamba.py", str(write_published_model("nemotron3", path / "model")))


LAYERS = [
    pytest.mark.families,
    pytest.mark.mcore,
    pytest.mark.skipif(
        not in_range(installed_version("megatron-core"), HAS_MAMBA), reason="refused with this megatron-core"
    ),
]


class TestLayers:
    pytestmark = LAYERS

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("content", ["zeros", "anything", "nan"])
    def test_each_row_is_its_sequence_alone(self, side, content, facts):
        found = facts[f"{side}, {content}"]
        assert found["padding's gradient"] == 0, found
        assert max(found.values()) < 1e-5, found

    def test_packed_sequences_are_each_sequence_alone(self, facts):
        assert max(facts["packed"].values()) < 1e-5, facts["packed"]

    def test_padding_that_is_taken_for_tokens_gets_in(self, facts):
        assert facts["left, all tokens"]["output"] > 1e-3

    def test_a_layer_that_does_not_know_its_padding_says_so(self, facts):
        assert "outside its micro-batch's scope" in facts["no scope"]
        assert "no linear_attn_mask" in facts["no map"]
        assert "(3, 7)" in facts["another shape"]

    def test_without_the_patch_there_is_no_layer(self, facts):
        assert "MambaSSM is not installed" in facts["unpatched"]
        assert facts["applied"] == {"megatron.mamba-padding": "applied", "megatron.mamba-kernels": "applied"}
