"""ms-swift from the registry, neither edited nor stubbed, trains on gloo ranks as transformers computes."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from plugins.swift.tests import trained, words

ALONE = Path(__file__).parent / "programs" / "alone.py"
PACKED = {"padding_free": "true", "attention_backend": "flash"}
# What ms-swift must be told for exact gradients: docs/upstream/megatron.md has both faults.
EXACT = {"cross_entropy_loss_fusion": "false", "perform_initialization": "true"}
LAYOUTS = {
    "padded": {},
    "packed": PACKED,
    "padded, TP2": {"ranks": 2, "tensor_model_parallel_size": 2, "sequence_parallel": "true"},
    "padded, CP2": {"ranks": 2, "context_parallel_size": 2},
    "packed, CP2": {"ranks": 2, "context_parallel_size": 2, **PACKED},
    "padded, PP2": {"ranks": 2, "pipeline_model_parallel_size": 2},
    "packed, EP2": {"ranks": 2, "expert_model_parallel_size": 2, **PACKED},
}
NO_EXPERTS = [name for name in LAYOUTS if "EP" not in name]
FAMILIES = {
    "qwen3": NO_EXPERTS,
    "qwen3_moe": ["packed, EP2"],
    "qwen3_next": ["padded", "packed"],
    "qwen2_5_vl": NO_EXPERTS,
    "qwen3_vl": NO_EXPERTS,
    "qwen3_5": ["padded", "packed"],
}
CASES = [(family, layout) for family, layouts in FAMILIES.items() for layout in layouts]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_first_step_is_that_of_transformers(prepared, family, layout):
    directory = prepared(family)
    first, second = trained.train(directory, family, name=layout, **EXACT, **LAYOUTS[layout])
    loss, norm = trained.expected(directory, family)
    assert first["loss"] == pytest.approx(loss, abs=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert second["loss"] < first["loss"]


def test_the_platforms_masks_take_the_place_of_those_of_ms_swift(prepared):
    directory = prepared("qwen3")
    trained.train(directory, "qwen3", name="report", **EXACT)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("patches-*.json")]
    states = {record["id"]: record["outcome"] for report in reports for record in report}
    assert states["swift.prepare-batch"] == states["swift.model-forward"] == "applied"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_without_them_padding_would_enter_the_state_of_gated_delta_net(prepared, monkeypatch, family):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(RuntimeError, match="Gated DeltaNet"):
        trained.train(prepared(family), family, name="alone", start=[sys.executable, str(ALONE)], **EXACT)


@pytest.mark.parametrize("options", [{}, PACKED], ids=["padded", "packed"])
def test_preferences_are_learnt_from(prepared, options, request):
    directory = prepared("qwen3")
    rejected = directory / "rejected.jsonl"
    conversations = words.conversations(directory)
    rejected.write_text(
        "".join(
            json.dumps({**one, "rejected_response": one["messages"][1]["content"][::-1]}) + "\n"
            for one in conversations
        )
    )
    first, second = trained.train(
        directory,
        "qwen3",
        name=request.node.name,
        command="rlhf",
        dataset=rejected,
        rlhf_type="dpo",
        **EXACT,
        **options,
    )
    sums = [losses.sum().item() for losses in words.answer_losses(directory, trained.transformers_model(directory))]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["logps/chosen"] == pytest.approx(-sum(sums) / len(sums), abs=1e-4)
    assert second["rewards/margins"] > 0
