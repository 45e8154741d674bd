"""Fields that mcore-bridge reads without asking whether a configuration has them, derived from its source."""

import ast
import importlib.util
from pathlib import Path

import pytest
from transformers import Gemma4UnifiedTextConfig

from anytron_megatron.models.configuration import COMPLETED, completed

SOURCE = Path(importlib.util.find_spec("mcore_bridge").submodule_search_locations[0])
ROTARY = {"rope_scaling", "hf_rope_scaling", "rope_parameters"}
LOOKED_AT = {"type", "alpha", "partial_rotary_factor", "rope_theta", "mrope_section"}
"""It asks for these before it reads them."""
BY_LAYER_TYPE = {"main", "compress", "sliding_attention", "full_attention"}
"""Embeddings of Gemma 4 and DeepSeek-V4, which transformers fills in for each type of layer."""
CONVERTED = {
    # Every class of transformers has them, and none computes without them.
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "moe_ffn_hidden_size",
    # DeepSeek-V4's and GLM-5-Next's, whose classes have them
    "kv_channels", "num_residual_streams",
}  # fmt: skip
ASSERTED = {
    "isinstance(pattern, str)",
    "isinstance(x, str)",
    # It sets both fields itself, for gpt-oss.
    "not self.swiglu",
    # engine.options.transformer.mtp_shared_weights, no field of a model
    "self.mtp_num_layers is not None",
}


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", None))


def subscripts(names, below="."):
    """Keys that files of the bridge read as ``name["key"]``."""
    return {
        node.slice.value
        for path in (SOURCE / below).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and name_of(node.value) in names
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    }


def test_every_rotary_field_that_the_bridge_wants_is_filled_in_or_looked_at():
    assert subscripts(ROTARY) == COMPLETED | LOOKED_AT | BY_LAYER_TYPE


def test_every_other_field_that_the_bridge_wants_is_one_that_transformers_always_has():
    assert subscripts({"res"}, "config") == CONVERTED


def test_the_bridge_asserts_nothing_else_of_a_configuration():
    asserted = {
        ast.unparse(node.test)
        for path in (SOURCE / "config").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    }
    assert asserted == ASSERTED


def test_the_configuration_of_gemma_4_12b_lacks_what_the_bridge_reads():
    """The patch ``megatron.mcore-bridge-head-sizes`` gives it these fields."""
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        assert f"text_config.{name}" in (SOURCE / "model/mm_gpts/gemma4.py").read_text()
        assert not hasattr(Gemma4UnifiedTextConfig(), name)


@pytest.mark.parametrize("lacks", sorted(COMPLETED))
@pytest.mark.parametrize("null", [False, True])
def test_a_field_that_is_missing_or_null_gets_the_value_that_transformers_computes_with(lacks, null):
    rotary = {"type": "yarn", "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    rotary |= {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.5}
    file = {**rotary, lacks: None} if null else {key: value for key, value in rotary.items() if key != lacks}
    before = dict(file)
    found = completed({"rope_scaling": file, "max_position_embeddings": 256})["rope_scaling"]
    assert file == before
    filled = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.0, "mscale_all_dim": 0.0}[lacks]
    assert found == {**rotary, lacks: filled}


def test_other_embeddings_stay_as_they_are():
    for rotary in ({"rope_type": "linear", "factor": 2.0}, {"main": {"rope_type": "yarn"}, "compress": None}, None):
        converted = {"rope_scaling": rotary, "max_position_embeddings": 256}
        assert completed(converted) == converted
    assert completed({"num_layers": 2}) == {"num_layers": 2}
