"""DeepSeek-V3 as published: experts in groups of which some are chosen, queries compressed or not."""

import pytest
import torch

from anytron_conformance.tiny_models import write_tiny_model
from tests.backends.megatron.engine.test_rotary_embeddings import hugging_face

VARIANTS = {
    # DeepSeek-V3 has 8 groups of 32, takes 4 of them, and 8 experts from those.
    "grouped experts": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "queries not compressed": {"q_lora_rank": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_agrees_with_hugging_face(variant, recorded, start_engine, tmp_path):
    directory = write_tiny_model("deepseek_v3", tmp_path / "model", num_hidden_layers=3, **VARIANTS[variant])
    with start_engine(model={"path": str(directory)}) as (workers, updates, _):
        found = workers.score(recorded, updates, "policy")
    torch.testing.assert_close(found, hugging_face(directory, recorded) * recorded.response_mask, atol=1e-5, rtol=1e-5)
