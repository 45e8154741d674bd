"""Each model type of the bridge, as transformers configures it: built, or refused by name before the start."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from anytron.config.schema import ModelSection, RunConfig
from anytron.device.patches.plan import in_range, installed_version
from anytron.task.data.composites import COMPOSITES
from anytron.task.data.model_files import SAME_MODELS
from anytron.task.data.pretrained import logits_config
from anytron.task.data.vision import load_vision
from anytron_megatron.models.families import FAMILIES
from anytron_megatron.models.release import HAS_MAMBA, HAS_SPARSE_ATTENTION
from anytron_megatron.options import transformer_fields
from anytron_megatron.plugin import MegatronBackend

MEGATRON = installed_version("megatron-core")
REGISTERED_AS = {"llava_onevision1_5": "llavaonevision1_5"}
"""``model_type`` that the bridge registers -> that of the published files, which its ``config/parser.py`` has too."""
LAYERS = 4
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "intermediate_size_mlp": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "moe_k": 2,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    # towers: of images by depth, of sound by encoder_layers
    "depth": 1, "encoder_layers": 1, "encoder_ffn_dim": 64, "encoder_attention_heads": 4, "d_model": 64,
    "embed_dim": 64, "num_heads": 4, "out_hidden_size": 64, "output_dim": 64, "q_lora_rank": 32, "kv_lora_rank": 16,
}  # fmt: skip
BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers", "indexer_types")
TOKENS = {"image_token_id": 500, "video_token_id": 501, "audio_token_id": 502}
DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_experts_per_tok": 2}
WRITTEN = {
    # Published configurations say so; transformers has it built in.
    **dict.fromkeys(("deepseek_v3", "deepseek_v32"), DEEPSEEK),
    "glm_moe_dsa": {"indexer_rope_interleave": True, "num_experts_per_tok": 2},
    # transformers has no experts by default, and takes no such model.
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "hy_v3": {"qk_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True},
    # transformers writes sizes of heads by layer
    "gemma4": {"hidden_size_per_layer_input": 0, "global_head_dim": 32},
    "gemma4_unified": {"global_head_dim": 32},
    # longer sequences are refused
    "llama4": {"max_position_embeddings": 4096, "num_experts_per_tok": 1},
    "minimax_m2": {"scoring_func": "sigmoid"},
    # transformers has a dense layer by default, which is refused.
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "qwen3_vl_moe": {"moe_intermediate_size": 48},
}  # fmt: skip


def shrunken(fields):
    """A configuration with all of its fields, small enough to build in milliseconds."""
    small = {}
    for name, value in fields.items():
        if name == "per_layer_config":
            continue
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = shrunken(value)
        elif isinstance(value, int) and not isinstance(value, bool) and name in SMALL:
            small[name] = min(value, SMALL[name])
        elif value is not None and name in TOKENS:
            small[name] = TOKENS[name]
        elif value and name in BY_LAYER:
            small[name] = value[:LAYERS]
        else:
            small[name] = value
    return small


def configuration(family):
    """As transformers writes it; the bare model type if it has no class."""
    if family not in CONFIG_MAPPING:
        return {"model_type": family}
    config = AutoConfig.for_model(family).to_dict()
    if FAMILIES[family].obstacle:
        return config  # it is not built
    if family == "gemma4":
        config["vision_config"] = AutoConfig.for_model("gemma4_vision").to_dict()  # transformers has none by default
    config = shrunken(config)
    (config.get("text_config") or config).update(WRITTEN.get(family, {}))
    return config


def refusals(config):
    model = {"config": config, "tokenizer": "t"}
    sections = {"data": {"source": "s"}, "rewards": [{"function": "f"}], "rollout": {"max_new_tokens": 8}}
    run = RunConfig.model_validate({"model": model, **sections})
    return [found for found in MegatronBackend().configure(run) if found.severity == "error"]


@pytest.fixture(scope="module")
def configurations():
    return {family: configuration(family) for family in FAMILIES}


class Words:
    def convert_ids_to_tokens(self, token):
        return str(token)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_is_refused_by_name_or_its_images_are_understood(configurations, family):
    config = configurations[family]
    found = refusals(config)
    assert found or not FAMILIES[family].obstacle
    for one in found:
        assert family in one.message
        assert one.fix
    if family in CONFIG_MAPPING and not found:
        told, whole = [], AutoConfig.for_model(**config)
        part = logits_config(whole)
        vision = load_vision(ModelSection(config=config, tokenizer="t"), whole, Words(), told.append)
        sees = all(getattr(part, name, None) is not None for name in ("vision_config", "image_token_id"))
        assert bool(told) == (sees and vision is None)
        assert all(f"{family} is not supported with images" in line for line in told)
        if FAMILIES[family].proof:
            assert (vision is not None) == FAMILIES[family].takes_images


def test_a_gemma_4_without_a_tower_is_refused_because_the_bridge_builds_one():
    (found,) = refusals({**configuration("gemma4"), "vision_config": None})
    assert "no vision_config" in found.message
    (bridge,) = find_spec("mcore_bridge").submodule_search_locations
    source = (Path(bridge) / "model/mm_gpts/gemma4.py").read_text()
    assert "self.vision_tower = AutoModel.from_config(hf_config.vision_config)\n" in source


@pytest.fixture(scope="module")
def installed(configurations, tmp_path_factory):
    """What the installed libraries say of themselves, and what they make of each model that is not refused."""
    folder = tmp_path_factory.mktemp("models")
    buildable = {family: config for family, config in configurations.items() if not FAMILIES[family].obstacle}
    models = {family: config for family, config in buildable.items() if not refusals(config)}
    models["sizes of experts and no experts"] = {**configurations["dots1"], "n_routed_experts": None}
    for name, config in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    program = [sys.executable, "-W", "ignore", "-m", "tests.backends.megatron.checks.every_family", str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_is_not_refused_is_built(installed):
    sizes = dict(installed["built"])
    contradiction = sizes.pop("sizes of experts and no experts")
    says = "(must be None|is set but num_moe_experts is None)"  # megatron-core before and since 0.18
    assert re.search(rf"(?s)^refused: .*refuse the model.*moe_ffn_hidden_size {says}", contradiction)
    sparse, mamba = (in_range(MEGATRON, release) for release in (HAS_SPARSE_ATTENTION, HAS_MAMBA))
    proven = [row for row in FAMILIES.values() if row.proof and sparse >= row.sparse_attention and mamba >= row.hybrid]
    # those are read as other types
    assert {row.model_type for row in proven} - SAME_MODELS.keys() - COMPOSITES.keys() <= sizes.keys()
    assert {name: size for name, size in sizes.items() if not isinstance(size, int)} == {}
    assert 0 < min(sizes.values()) <= max(sizes.values()) < 20e6


def test_the_list_of_families_is_the_bridges(installed):
    newer = {"nemotron_h"} if in_range(MEGATRON, "<0.18") else set()
    assert set(FAMILIES) == {*(REGISTERED_AS.get(name, name) for name in installed["families"]), *newer}
    assert newer.isdisjoint(installed["families"])


def test_the_options_are_the_fields_of_the_installed_config(installed):
    assert sorted(transformer_fields(latent_attention=False)) == installed["options"]
    assert sorted(transformer_fields(latent_attention=True)) == installed["latent"]
