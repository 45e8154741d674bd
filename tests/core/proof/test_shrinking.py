"""The new sizes of published models: small, divisible as before, and with every pattern and flag."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from anytron.base.errors import ConfigError
from anytron.base.traits import ParallelSizes
from anytron.proof.shrinking import weights
from anytron.proof.shrinking.configuration import DROPPED
from anytron.proof.shrinking.run import shrink_published, shrink_run
from anytron.proof.shrinking.weights import write_shrunk_model
from tests.verification.published_configs import PUBLISHED

ONE = ParallelSizes()
SPLIT = ParallelSizes(tensor=4, pipeline=2, context=2, expert=16)
SIZES = (  # noqa: SIM905
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size intermediate_size "
    "moe_intermediate_size shared_expert_intermediate_size n_routed_experts num_experts num_local_experts "
    "num_experts_per_tok experts_per_token kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "rotary_dim sliding_window max_window_layers first_k_dense_replace layer_types attn_type_list n_group topk_group "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim rope_scaling rope_parameters"
).split()
"""Fields that may change; all others are flags, or numbers that do not depend on the size."""
VISION_SIZES = (  # noqa: SIM905
    "depth hidden_size intermediate_size num_heads out_hidden_size patch_size spatial_patch_size window_size "
    "num_position_embeddings fullatt_block_indexes deepstack_visual_indexes"
).split()
LLAMA = PUBLISHED["Llama-3.3-70B-Instruct"]


def small(name, layout=ONE, **changes):
    return shrink_published({**deepcopy(PUBLISHED[name]), **changes}, name, layout)


def text_of(fields):
    return fields.get("text_config", fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_sizes_and_numbers_of_tokens_change(name):
    before, shrunk = PUBLISHED[name], small(name)
    assert set(shrunk.dropped) == before.keys() & set(DROPPED)
    for part, sizes in (("text_config", SIZES), ("vision_config", VISION_SIZES), ("", SIZES)):
        old, new = (one.get(part, {}) if part else one for one in (before, shrunk.fields))
        changed = {field for field in new if new[field] != old.get(field)}
        allowed = {field for field in changed if field.endswith("token_id")} | {"text_config", "vision_config"}
        assert changed <= {*sizes, *allowed}
        assert old.keys() - new.keys() <= set(DROPPED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_divides_the_published_sizes_divides_the_new_ones(name):
    before, after = text_of(PUBLISHED[name]), text_of(small(name, SPLIT).fields)
    assert after["num_hidden_layers"] % 4 == 0, "two stages, each of them in two parts"
    heads, groups = "num_attention_heads", "num_key_value_heads"
    assert before[heads] / before[groups] == after[heads] / after[groups]
    for field in (heads, groups, "linear_num_key_heads", "linear_num_value_heads"):
        if before.get(field, 1) % 8 == 0:
            assert after[field] % 8 == 0
    for field in ("intermediate_size", "moe_intermediate_size"):
        assert after.get(field, 0) % 4 == 0
    for field in ("n_routed_experts", "num_experts", "num_local_experts"):
        assert after.get(field, 0) % 16 == 0
        assert after.get(field, 99) > after.get("num_experts_per_tok", 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_stay_different_and_are_in_the_vocabulary(name):
    fields = small(name).fields
    published = {**text_of(PUBLISHED[name]), **PUBLISHED[name]}
    new = {**text_of(fields), **fields}
    named = [field for field in published if field.endswith("token_id") and published[field] is not None]
    flat = {field: one[field] if isinstance(one[field], list) else [one[field]] for one in (new,) for field in named}
    assert all(0 <= number < text_of(fields)["vocab_size"] for numbers in flat.values() for number in numbers)
    for first in named:
        for second in named:
            assert (published[first] == published[second]) == (new[first] == new[second])


def test_deepseek_rates_its_groups_by_as_many_experts():
    cut = small("DeepSeek-V3")
    new = cut.fields
    assert (new["n_routed_experts"], new["n_group"], new["topk_group"], new["num_experts_per_tok"]) == (16, 4, 2, 4)
    assert new["first_k_dense_replace"] == 1
    assert cut.cuts["first_k_dense_replace"] == (3, 1)
    assert "num_hidden_layers 61 -> 4" in cut.lines[0]
    assert new["q_lora_rank"] > new["kv_lora_rank"] > 0
    assert small("DeepSeek-V2-Lite").fields["q_lora_rank"] is None


@pytest.mark.parametrize(
    ("name", "changes", "field", "expected"),
    [
        ("gpt-oss-20b", {}, "layer_types", ["sliding_attention", "full_attention"] * 2),
        ("Qwen3.5-397B-A17B", {}, "layer_types", [*["linear_attention"] * 3, "full_attention"]),
        ("Qwen3-8B", {"use_sliding_window": True, "max_window_layers": 18}, "max_window_layers", 3),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers", [0, 1, 2]),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [40]}, "mlp_only_layers", [3]),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 6}, "num_hidden_layers", 6),
        # a dense layer, and then three and one in turn
        ("DeepSeek-V3", {"layer_types": ["a"] * 3 + ["b", "b", "b", "a"] * 14 + ["b", "b"]}, "num_hidden_layers", 5),
        ("Llama-3.3-70B-Instruct", {"layer_types": ["a"] * 50 + ["b"] * 30}, "layer_types", ["a", "a", "a", "b"]),
        ("Llama-3.3-70B-Instruct", {"num_hidden_layers": 2}, "num_hidden_layers", 2),
    ],
)  # fmt: skip
def test_layers_of_each_kind_stay(name, changes, field, expected):
    assert text_of(small(name, **changes).fields)[field] == expected


def test_rotary_parts_stay_even_and_sections_fill_them():
    for name, section, head, part in (
        ("Qwen3.5-397B-A17B", [2, 1, 1], 32, 0.25),
        ("Qwen3-VL-8B-Instruct", [4, 2, 2], 16, 1),
        ("Qwen2.5-VL-7B-Instruct", [2, 3, 3], 16, 1),
    ):
        new = text_of(small(name).fields)
        rotation = new.get("rope_parameters") or new["rope_scaling"]
        size = new.get("head_dim") or new["hidden_size"] // new["num_attention_heads"]
        assert (rotation["mrope_section"], size) == (section, head)
        assert 2 * sum(section) == size * part
    assert small("MiniMax-M2").fields["rotary_dim"] * 2 == small("MiniMax-M2").fields["head_dim"]


def test_vision_towers_keep_their_special_layers():
    tower = small("Qwen3-VL-8B-Instruct").fields["vision_config"]
    assert (tower["depth"], tower["deepstack_visual_indexes"]) == (5, [1, 2, 3])
    assert tower["out_hidden_size"] == small("Qwen3-VL-8B-Instruct").fields["text_config"]["hidden_size"]
    tower = small("Qwen2.5-VL-7B-Instruct").fields["vision_config"]
    assert (tower["depth"], tower["fullatt_block_indexes"], tower["window_size"]) == (4, [1, 3], 16)


def test_sizes_that_the_file_leaves_to_its_class_are_cut():
    published = {name: value for name, value in PUBLISHED["Qwen3-8B"].items() if name != "head_dim"}
    assert shrink_published(published, "here", ONE).fields["head_dim"] == 16  # the class says 128
    derived = small("Llama-3.3-70B-Instruct").fields
    assert "head_dim" not in derived  # the class divides the width by the heads
    assert derived["hidden_size"] == 16 * derived["num_attention_heads"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": None, "model_type": "unknown"}, "the size of its layers is not known: it has none of"),
        ({"audio_config": {"depth": 2}}, "the sizes of its audio_config are not known"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": 3}}, "a field has another form"),
        ({"num_key_value_heads": "8"}, "a field has another form"),
        ({"vision_config": {"model_type": "clip"}}, "does not describe a tower that reads patches with a grid"),
    ],
)
def test_what_cannot_be_shrunk_is_refused_with_a_way_out(changes, why):
    with pytest.raises(ConfigError, match="This model cannot be shrunk") as refusal:
        shrink_published({**LLAMA, **changes}, "config.json", ONE)
    assert why in refusal.value.why
    assert "model.config" in refusal.value.fix


def test_a_size_that_is_not_known_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MOST_PARAMETERS", 100_000)
    with pytest.raises(ConfigError, match="This model cannot be shrunk") as refusal:
        write_shrunk_model({**small("ERNIE-4.5-0.3B-PT").fields}, "here", tmp_path, "float32", 0, "causal")
    assert "some of its sizes are not known" in refusal.value.why
    assert "model.layers.0.self_attn.q_proj.weight (256, 64)" in refusal.value.why


def test_a_directory_without_a_configuration_says_what_to_put_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ConfigError, match="There is no configuration to shrink") as refusal:
        shrink_run(tmp_path / "model", [], tmp_path / "scratch")
    assert "config.json" in refusal.value.fix


def test_a_malformed_field_is_named(tmp_path):
    file = tmp_path / "qwen.json"
    file.write_text(json.dumps({**LLAMA, "num_hidden_layers": "80"}))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ConfigError, match="malformed") as refusal:
        shrink_run(file, [], tmp_path / "scratch")
    assert "num_hidden_layers" in refusal.value.why


def test_a_model_whose_images_have_no_grid_is_refused():
    """Its run would get a processor of images, which the model does not take."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
    fields = {"model_type": "minicpmv4_6", "text_config": {"model_type": "qwen3_5_text", **sizes}, "vision_config": {}}
    with pytest.raises(ConfigError, match="a tower that reads patches with a grid"):
        shrink_published(fields, "config.json", ONE)
