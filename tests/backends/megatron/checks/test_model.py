"""Models that cannot be trained, or would be computed wrongly, are refused when the configuration is read."""

import json
import re

import pytest

from anytron.config.schema import ModelSection, RunConfig
from anytron.device.patches.plan import installed_version
from anytron.task.data.composites import COMPOSITES
from anytron.task.data.model_files import SAME_MODELS, as_known
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.models.families import FAMILIES, Family
from anytron_megatron.plugin import MegatronBackend
from tests.backends.megatron.checks.test_every_family import REGISTERED_AS
from tests.backends.megatron.families.published import PUBLISHED

MEGATRON = installed_version("megatron-core")


def remarks(model, /, **sections):
    run = RunConfig.model_validate(
        {
            "model": {"config": model, "tokenizer": "t"},
            "data": {"source": "s"},
            "rewards": [{"function": "f"}],
            "rollout": {"max_new_tokens": 8},
            **sections,
        }
    )
    return list(MegatronBackend().configure(run))


def refusal(model, /, **sections):
    (only,) = remarks(model, **sections)
    assert only.severity == "error"
    return only


@pytest.mark.parametrize("family", CONFIGS)
def test_the_families_of_the_tests_are_not_remarked_on(family):
    assert remarks(CONFIGS[family]) == []


ANY_RELEASE = [
    name
    for name, model in PUBLISHED.items()
    if not (FAMILIES[model["model_type"]].sparse_attention or FAMILIES[model["model_type"]].hybrid)
]


@pytest.mark.parametrize("name", ANY_RELEASE)
def test_published_configurations_are_not_remarked_on(name):
    assert remarks(as_known(PUBLISHED[name])) == []  # as config.json of a directory is read


def test_a_family_that_no_test_compares_with_hugging_face_is_warned_of(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen3", Family("qwen3", rotates_whole_heads=True))
    (warning,) = remarks(CONFIGS["qwen3"])
    assert warning.severity == "warning"
    assert "no test of Anytron compares it" in warning.message


def test_an_unknown_family_gets_the_nearest_one():
    wrong = refusal({**CONFIGS["qwen3"], "model_type": "qwen33"})
    assert wrong.key == "model.config.model_type"
    assert wrong.fix == "did you mean qwen3?"
    assert "use one of bailing_hybrid" in refusal({"model_type": "t5"}).fix


def overriding(**fields):
    return {"options": {"transformer": fields}}


def test_an_unknown_field_gets_the_nearest_one():
    wrong = refusal(CONFIGS["qwen3"], engine=overriding(num_layerz=3))
    assert wrong.key == "engine.options.transformer.num_layerz"
    assert wrong.fix == "did you mean num_layers?"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mtp_detach_heads": True}, "not finite"),
        ({"mtp_use_repeated_layer": True}, "each depth"),
        ({"gtp_weight_remat_size": 2}, "split weights"),
        ({"expert_gtp_weight_remat_size": 2}, "split weights"),
    ],
)
def test_fields_of_newer_releases_that_would_break_a_promise_are_refused_by_any(fields, reason):
    wrong = refusal(CONFIGS["qwen3"], engine=overriding(**fields))
    assert wrong.key == f"engine.options.transformer.{next(iter(fields))}"
    assert reason in wrong.message


def test_fields_of_latent_attention_are_options_of_models_that_have_it():
    options = {"engine": overriding(rotary_scaling_factor=40)}
    assert remarks(CONFIGS["deepseek_v3"], **options) == []
    assert refusal(CONFIGS["qwen3"], **options).key == "engine.options.transformer.rotary_scaling_factor"


@pytest.mark.parametrize("scoring", [None, "softmax"])
def test_deepseek_v3_without_the_name_of_its_routing_is_refused(scoring):
    model = {**CONFIGS["deepseek_v3"], "scoring_func": scoring}
    assert "route by softmax" in refusal(model).message
    assert remarks(model, engine=overriding(moe_router_score_function="sigmoid")) == []
    other = refusal(model, engine=overriding(moe_router_score_function="softmax"))
    assert other.key == "engine.options.transformer.moe_router_score_function"
    assert other.fix == "set engine.options.transformer.moe_router_score_function=sigmoid"


def test_deepseek_v3_with_another_choice_of_experts_is_refused():
    assert "topk_method greedy" in refusal({**CONFIGS["deepseek_v3"], "topk_method": "greedy"}).message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}, "scores a group of experts by its 1 best"),
        ({"num_experts_per_tok": 1}, "to a sum of 1"),
        ({"norm_topk_prob": False}, "to a sum of 1"),
    ],
)
def test_deepseek_v3_routed_as_megatron_would_not_is_refused(changes, says):
    assert says in refusal({**CONFIGS["deepseek_v3"], **changes}).message


@pytest.mark.parametrize(("chosen", "best"), [(6, 2), (9, 3)])
def test_deepseek_v2_with_groups_that_megatron_would_rate_otherwise_is_refused(chosen, best):
    """DeepSeek-V2 itself has 8 groups, of which it takes 3, and 6 experts; DeepSeek-V2-Lite has one group."""
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3, "num_experts_per_tok": chosen}
    refused = refusal({**PUBLISHED["deepseek_v2"], **groups})
    assert f"by its {best} best" in refused.message
    assert "DeepSeek-V2 by its 1 best" in refused.message
    assert remarks({**PUBLISHED["deepseek_v2"], **groups, "num_experts_per_tok": 3}) == []


@pytest.mark.parametrize("name", ["glm4_6", "minimax_m2", "dots1", "hy_v3"])
def test_a_single_expert_that_is_chosen_by_sigmoid_is_refused(name):
    assert "to a sum of 1" in refusal({**PUBLISHED[name], "num_experts_per_tok": 1}).message


@pytest.mark.parametrize("family", ["deepseek", "bailing_moe"])
def test_families_without_a_class_in_transformers_are_refused(family):
    import transformers

    assert family not in transformers.CONFIG_MAPPING
    assert "transformers has no class for it" in refusal({"model_type": family}).message


@pytest.mark.parametrize(("family", "known"), SAME_MODELS.items())
def test_a_config_of_ones_own_gets_the_name_that_transformers_knows(family, known):
    """Of a directory it is replaced without a word: tests/core/task/data/test_same_models.py."""
    refused = refusal({**PUBLISHED[family], "model_type": family})
    assert refused.key == "model.config"
    assert refused.message == f"{family} cannot be trained: transformers has no such model type"
    assert f"set model.config.model_type={known}" in refused.fix
    assert remarks({**PUBLISHED[family], "model_type": known}) == []


def test_the_reasons_for_the_patches_of_ernie_with_experts_still_hold():
    from importlib.util import find_spec
    from pathlib import Path

    (root,) = find_spec("megatron").submodule_search_locations
    config = (Path(root) / "core/transformer/transformer_config.py").read_text()
    asked = r"if self.moe_router_enable_expert_bias and self.moe_router_score_function (.*?):\n"
    (allowed,) = re.findall(asked, config, re.DOTALL)
    assert "sigmoid" in allowed
    assert "softmax" not in allowed
    (root,) = find_spec("mcore_bridge").submodule_search_locations
    assert not [path for path in Path(root).rglob("*.py") if "moe_statics" in path.read_text()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_layer_interval": 2}, "moe_layer_interval is 2"),
        ({"moe_layer_end_index": 2}, "moe_layer_end_index 2"),
        ({"moe_layer_end_index": 3}, None),
        ({"moe_layer_end_index": -1}, None),
    ],
)
def test_an_ernie_with_experts_in_other_layers_is_refused(changes, reason):
    found = [one.message for one in remarks({**PUBLISHED["ernie4_5_moe"], **changes})]
    assert [reason in message for message in found] == [True] * (reason is not None)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("moe_router_fusion", "ignores the bias"),
        ("moe_router_pre_softmax", "ignores the bias"),
        ("moe_router_enable_expert_bias", "Anytron sets this option itself"),
    ],
)
def test_an_option_by_which_the_bias_of_an_ernie_would_be_lost_is_refused(option, reason):
    engine = {"options": {"transformer": {option: True}}}
    refused = refusal(PUBLISHED["ernie4_5_moe"], engine=engine)
    assert refused.key == f"engine.options.transformer.{option}"
    assert reason in refused.message


@pytest.mark.parametrize(("size", "square"), [(32, True), (64, True), (48, False)])
def test_experts_whose_orientation_no_shape_tells_are_refused(size, square):
    published = PUBLISHED["qwen3_vl_moe"]
    config = {**published, "text_config": {**published["text_config"], "moe_intermediate_size": size}}
    assert ["is square" in one.message for one in remarks(config)] == [True] * square


def bridge_sources():
    from importlib.util import find_spec
    from pathlib import Path

    (root,) = find_spec("mcore_bridge").submodule_search_locations
    return {path.relative_to(root).as_posix(): path.read_text() for path in Path(root).rglob("*.py")}


def test_qwen4_exp_is_refused_because_packed_sequences_need_triton_and_its_table_is_exported_in_parts():
    from transformers import Qwen4ExpTextConfig
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    assert "Triton kernels, which no test has run" in refusal({"model_type": "qwen4_exp"}).message
    sources = bridge_sources()
    source, kernels = sources["model/gpts/qwen4_exp.py"], sources["model/modules/kernels/qsa_kernels.py"]
    assert "needs_kernel = is_thd or cp_size > 1" in source
    assert "if not HAVE_TRITON or head_dim <= 0" in kernels
    assert "{shard_prefix}.shard_{i}.weight" in source
    parts = [one.source_patterns for one in get_checkpoint_conversion_mapping("qwen4_exp_text")]
    assert ["ngram_embedding.shard_*.weight"] in parts, "transformers joins them"
    assert Qwen4ExpTextConfig().split_ngram_parts > 1


def test_a_kind_of_rotary_embedding_is_taken_for_the_family_that_a_test_compares():
    wrong = refusal({**CONFIGS["qwen3"], "rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0}})
    assert "rotary embeddings of type proportional are not supported" in wrong.message


LLAMA_INSIDE = {
    **PUBLISHED["internvl3_5"],
    "text_config": {**PUBLISHED["internvl3"]["text_config"], "model_type": "llama"},
}


def test_internvl_with_another_language_model_is_refused():
    wrong = refusal(LLAMA_INSIDE)
    assert "the language model (text_config) of this internvl is llama" in wrong.message
    assert "(tested: qwen2, qwen3, qwen3_moe)" in wrong.message


def test_adapters_of_experts_in_internvl_are_refused_because_peft_does_not_find_them():
    from peft.utils.transformers_weight_conversion import _MOE_TARGET_MODULE_MAPPING
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    def adapted(name):
        return {"config": PUBLISHED[name], "tokenizer": "t", "lora": {"rank": 4}}

    wrong = refusal(PUBLISHED["internvl3_5_moe"], model=adapted("internvl3_5_moe"))
    assert (wrong.key, "leave the adapters of experts out" in wrong.message) == ("model.lora", True)
    assert _MODEL_TO_CONVERSION_PATTERN["qwen3_moe"] in _MOE_TARGET_MODULE_MAPPING
    assert _MODEL_TO_CONVERSION_PATTERN["internvl"] not in _MOE_TARGET_MODULE_MAPPING
    assert remarks(PUBLISHED["internvl3_5"], model=adapted("internvl3_5")) == []


@pytest.mark.parametrize(
    ("sections", "key", "reason"),
    [
        ({"parallel": {"pipeline_model_parallel_size": 2}}, "parallel.pipeline_model_parallel_size", "padded rows"),
        ({"parallel": {"context_parallel_size": 2}}, "parallel.context_parallel_size", "an embedding of each token"),
        ({"engine": {"recompute": "full"}}, "engine.recompute", "computed again"),
    ],
)
def test_layers_that_share_keys_are_refused_where_no_layout_holds(sections, key, reason):
    wrong = refusal(PUBLISHED["gemma4_e2b"], **sections)
    assert (wrong.key, reason in wrong.message) == (key, True)
    assert remarks(PUBLISHED["gemma4_31b"], **sections) == []


def test_the_reasons_for_refusing_shared_keys_hold_in_the_source():
    source = bridge_sources()["model/mm_gpts/gemma4.py"]
    assert source.count("assert self.num_kv_shared_layers") == 2
    assert "sliding_states.view(*hidden_states.shape[:2], -1)" in source  # [T, N, D] -> [T, 1, N * D]
    assert "sliding_states = sliding_states.reshape(*sliding_states_shape)" in source  # -> [T, 1, N, D], not [T, N, D]
    assert "self.embed_tokens_per_layer(llm_input_ids)" in source
    assert "split_cp" not in source
    text = {**PUBLISHED["gemma4_e2b"]["text_config"], "num_kv_shared_layers": 0}
    wrong = refusal({**PUBLISHED["gemma4_e2b"], "text_config": text})
    assert "both are 0, or neither is" in wrong.message


def test_a_tower_that_gets_no_images_is_no_part_to_train():
    frozen = {"config": PUBLISHED["internvl3_5"], "tokenizer": "t", "freeze": ["language_model"]}
    wrong = refusal(PUBLISHED["internvl3_5"], model=frozen)
    assert (wrong.key, wrong.fix) == ("model.freeze", "remove language_model from model.freeze")
    assert "gives internvl no images: nothing is trained" in wrong.message
    overlapped = {"engine": {"options": {"overlap_grad_reduce": True}}}
    assert remarks(PUBLISHED["internvl3_5"], **overlapped) == []
    assert "for aligner and vision_tower" in refusal(PUBLISHED["qwen2_vl"], **overlapped).message


def test_families_whose_bridge_imports_files_of_the_model_directory_are_those_that_are_refused():
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    (root,) = find_spec("mcore_bridge").submodule_search_locations
    importing = set()
    for path in Path(root).rglob("*.py"):
        tree = ast.parse(path.read_text())
        classes = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and any(word in ast.unparse(node) for word in ("get_class_from_dynamic_module", "trust_remote_code"))
        }
        for node in ast.walk(tree):
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ModelMeta" and names & classes:
                importing |= set(ast.literal_eval(node.args[1]))

    assert {REGISTERED_AS.get(name, name) for name in importing} == set(COMPOSITES) <= set(FAMILIES)
    for family in COMPOSITES:
        assert "runs no code of a model directory" in refusal({**CONFIGS["qwen3"], "model_type": family}).message


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused(key):
    model = {**CONFIGS["llama"], key: {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    assert "longest sequence of a batch" in refusal(model).message
    assert "no test compares" in refusal({**CONFIGS["llama"], key: {"type": "novel"}}).message


def test_a_partial_rotation_that_transformers_ignores_is_refused():
    assert "ignores the setting" in refusal({**CONFIGS["llama"], "partial_rotary_factor": 0.5}).message
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert "ignores the setting" in refusal({**CONFIGS["qwen3"], "rope_parameters": parameters}).message


def test_prediction_modules_can_only_be_trained_where_there_are_any(tmp_path):
    trained = {"engine": {"options": {"mtp_loss_coefficient": 0.1}}}
    assert "has no multi-token prediction modules" in refusal(CONFIGS["deepseek_v3"], **trained).message
    model = {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1}
    assert "random weights" in refusal(model, **trained).message
    assert "no test compares" in refusal({**CONFIGS["qwen3"], "num_nextn_predict_layers": 1}, **trained).message
    (tmp_path / "config.json").write_text(json.dumps(model))
    run = RunConfig.model_validate(
        {"model": {"path": str(tmp_path)}, "data": {"source": "s"}, "rewards": [{"function": "f"}], **trained}
    )
    assert [d for d in MegatronBackend().configure(run) if d.key.startswith("engine.")] == []


def test_faults_of_the_weights_are_errors_at_the_models_path(tiny_model, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:3000])
    run = RunConfig.model_validate(
        {
            "model": {"path": "x"},
            "data": {"source": "s"},
            "rewards": [{"function": "f"}],
            "rollout": {"max_new_tokens": 8},
        }
    )
    (only,) = MegatronBackend().configure(run.model_copy(update={"model": ModelSection(path=str(tmp_path))}))
    assert (only.severity, only.key) == ("error", "model.path")
    assert "cut short" in only.message
    assert only.fix == "complete the download"
