import json
import shutil
import subprocess
import sys
from importlib.metadata import requires
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from safetensors.torch import save_file

from anytron.config.load import load_config
from anytron.config.schema import ModelSection, RunConfig
from anytron.device.hooks.types import ProcessInfo
from anytron.device.patches import Phase
from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.plugin import MegatronBackend
from tests.reward_models import write_reward_model

MODEL = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6,
         "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}  # fmt: skip


def config(model=MODEL, **sections):
    values = {
        "model": {"config": model, "tokenizer": "t"},
        "data": {"source": "s"},
        "rewards": [{"function": "f"}],
        "rollout": {"max_new_tokens": 8},
        **sections,
    }
    return RunConfig.model_validate(values)


def keys(run):
    return [(d.severity, d.key) for d in MegatronBackend().configure(run)]


def test_importing_the_plugin_is_light():
    heavy = "('torch', 'megatron', 'transformers')"
    code = f"import sys, anytron_megatron.plugin; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_installed_libraries_satisfy_the_requirements():
    for needed in MegatronBackend().requirements(None):
        assert in_range(installed_version(needed.package), needed.specifier), needed


def test_an_installation_without_extras_satisfies_the_requirements():
    declared = {Requirement(text).name.lower() for text in requires("anytron") if "extra ==" not in text}
    assert {needed.package for needed in MegatronBackend().requirements(None) if not needed.optional} <= declared


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (4, 3), (1, 6)])
def test_fitting_sizes_are_not_remarked_on(sizes):
    tensor, pipeline = sizes  # 4 ranks share 2 key/value heads: Megatron replicates them
    run = config(parallel={"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline})
    assert keys(run) == []


@pytest.mark.parametrize(
    ("section", "model", "key"),
    [
        ({"parallel": {"tensor_model_parallel_size": 8}}, MODEL, "parallel.tensor_model_parallel_size"),
        (
            {"parallel": {"tensor_model_parallel_size": 2}},
            {**MODEL, "num_key_value_heads": 3},
            "parallel.tensor_model_parallel_size",
        ),
        ({"parallel": {"pipeline_model_parallel_size": 4}}, MODEL, "parallel.pipeline_model_parallel_size"),
        ({"rollout": {"max_new_tokens": 64}}, MODEL, "rollout.max_new_tokens"),
    ],
)
def test_impossible_sizes_are_errors_at_the_key_that_is_wrong(section, model, key):
    assert keys(config(model, **section)) == [("error", key)]


def test_sizes_are_read_from_a_model_directory_and_from_a_multimodal_models_text_part(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": MODEL}))
    run = config(parallel={"pipeline_model_parallel_size": 5})
    run = run.model_copy(update={"model": ModelSection(path=str(tmp_path))})
    assert keys(run) == [("error", "parallel.pipeline_model_parallel_size")]


def test_a_relative_model_directory_has_been_anchored_when_the_hook_is_called(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "run.yaml").write_text("model: {path: model}\ndata: {source: s}\nrewards: [{function: f}]\n")
    run = load_config(tmp_path / "run.yaml", ["parallel.pipeline_model_parallel_size=4", "rollout.max_new_tokens=8"])
    assert keys(run) == [("error", "parallel.pipeline_model_parallel_size")]


def test_the_distributed_optimizer_is_for_adam_only():
    assert keys(config(optimizer={"name": "sgd"})) == [("error", "engine.distributed_optimizer")]
    assert keys(config(optimizer={"name": "sgd"}, engine={"distributed_optimizer": False})) == []


def test_overlapped_reduction_is_for_parameters_that_always_have_gradients():
    overlap = {"engine": {"options": {"overlap_grad_reduce": True}}}
    vision = {**MODEL, "model_type": "qwen3_vl", "text_config": MODEL, "vision_config": {"depth": 1}}
    assert keys(config(**overlap)) == []
    assert ("error", "engine.options.overlap_grad_reduce") in keys(config(vision, **overlap))
    frozen = {"config": vision, "tokenizer": "t", "freeze": ["vision_tower", "aligner"]}
    assert keys(config(**overlap).model_copy(update={"model": ModelSection(**frozen)})) == []
    alone = {"engine": {"options": {"ddp_bucket_size": 7}}}
    assert keys(config(**alone)) == [("error", "engine.options.ddp_bucket_size")]


PPO = {"algorithm": {"advantage": "gae"}}


def test_a_critic_of_the_policys_model_is_not_remarked_on():
    assert keys(config(critic={}, **PPO)) == []


@pytest.mark.parametrize(
    ("model", "critic", "key", "says"),
    [
        ({}, {"num_experts": 4, "num_hidden_layers": 2}, "critic.path", "mixture of experts with 2 layers cannot be"),
        ({"vision_config": {"depth": 1}}, None, "critic", "the policy or the critic is a vision-language model"),
        ({"vocab_size": 90}, {"vocab_size": 80}, "critic.path", "vocab_size is 80, less than the policy's 90"),
        ({}, {"max_position_embeddings": 32}, "critic.path", "max_position_embeddings is 32, less"),
        ({}, {"model_type": "qwen33"}, "critic.path", "the critic's model: the engine does not support"),
        (
            {},
            {"num_hidden_layers": 5},
            "parallel.pipeline_model_parallel_size",
            "the critic's model: 5 layers cannot be split over 2",
        ),
    ],
)
def test_a_model_that_cannot_be_a_critic_is_refused_by_name(model, critic, key, says, tmp_path):
    section = {}
    if critic is not None:
        (tmp_path / "config.json").write_text(json.dumps({**MODEL, **critic}))
        section = {"path": str(tmp_path)}
    run = config({**MODEL, **model}, critic=section, parallel={"pipeline_model_parallel_size": 2}, **PPO)
    found = [(d.key, d.message) for d in MegatronBackend().configure(run)]
    assert [where for where, _ in found] == [key]
    assert all(says in message for _, message in found)


def test_a_fact_of_the_layout_is_said_once_although_two_models_have_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    run = config(critic={"path": str(tmp_path)}, parallel={"pipeline_model_parallel_size": 4}, **PPO)
    assert keys(run) == [("error", "parallel.pipeline_model_parallel_size")]


@pytest.mark.parametrize(
    ("model", "teacher", "key", "says"),
    [
        (
            {"vision_config": {"depth": 1}},
            {},
            "teacher.path",
            "distillation is not tested with a vision-language model",
        ),
        ({"vocab_size": 90}, {"vocab_size": 80}, "teacher.path", "vocabulary has 80 tokens, but the policy's has 90"),
        ({}, {"model_type": "qwen33"}, "teacher.path", "the teacher's model: the engine does not support"),
        (
            {},
            {"num_hidden_layers": 5},
            "parallel.pipeline_model_parallel_size",
            "the teacher's model: 5 layers cannot be split over 2",
        ),
    ],
)
def test_a_model_that_cannot_be_a_teacher_is_refused_by_name(model, teacher, key, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **teacher}))
    taught = {"teacher": {"path": str(tmp_path)}, "algorithm": {"distillation_coefficient": 1.0}}
    run = config({**MODEL, **model}, parallel={"pipeline_model_parallel_size": 2}, **taught)
    found = [(d.key, d.message) for d in MegatronBackend().configure(run)]
    assert (key, True) in [(where, says in message) for where, message in found]


def test_a_teacher_of_another_family_and_a_larger_vocabulary_is_not_remarked_on(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "model_type": "qwen2", "vocab_size": 100}))
    taught = {"teacher": {"path": str(tmp_path)}, "algorithm": {"distillation_coefficient": 1.0}}
    assert keys(config({**MODEL, "vocab_size": 90}, **taught)) == []


HEAD = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("model", "judge", "key", "says"),
    [
        (
            {"vision_config": {"depth": 1}},
            {},
            "reward_model.path",
            "reward models are not tested with a vision-language model as policy or reward model",
        ),
        ({"vocab_size": 90}, {"vocab_size": 80}, "reward_model.path", "has 80 tokens, but the policy's has 90"),
        ({}, {"model_type": "qwen33"}, "reward_model.path", "the reward model: the engine does not support"),
        ({}, {"id2label": {"0": "bad", "1": "good"}}, "reward_model.path", "config has 2 labels"),
        (
            {},
            {"num_hidden_layers": 5},
            "reward_model.parallel.pipeline_model_parallel_size",
            "the reward model: 5 layers cannot be split over 2",
        ),
    ],
)
def test_a_model_that_cannot_be_a_reward_model_is_refused_by_name(model, judge, key, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **HEAD, **judge}))
    section = {"path": str(tmp_path), "parallel": {"pipeline_model_parallel_size": 2}}
    judged = {"rewards": [{"function": "reward_model"}], "reward_model": section}
    run = config({**MODEL, **model}, **judged)
    found = [(d.key, d.message) for d in MegatronBackend().configure(run)]
    assert (key, True) in [(where, says in message) for where, message in found], found


@pytest.mark.parametrize(
    ("labels", "says"),
    [(0, "has no scoring head: no tensor score.weight (architectures in its config: Qwen3ForSequenceClassification)"),
     (2, "score.weight gives 2 numbers for a sequence (num_labels)"),
     (1, "")],
)  # fmt: skip
def test_a_reward_model_has_a_head_of_one_row_and_a_trunk_that_fits(labels, says, tmp_path, tiny_model):
    judge = write_reward_model(tiny_model, tmp_path / "judge", labels=labels)
    if not labels:
        shutil.copy(tiny_model / "model.safetensors", judge)
    judged = {"rewards": [{"function": "reward_model"}], "reward_model": {"path": str(judge)}}
    found = list(MegatronBackend().configure(config(json.loads((tiny_model / "config.json").read_text()), **judged)))
    assert [(one.key, says in one.message) for one in found] == ([("reward_model.path", True)] if says else [])


def test_weights_that_do_not_belong_to_a_reward_model_s_config_are_counted(tmp_path, tiny_model):
    judge = write_reward_model(tiny_model, tmp_path / "judge", num_hidden_layers=5)
    judged = {"rewards": [{"function": "reward_model"}], "reward_model": {"path": str(judge)}}
    (found,) = MegatronBackend().configure(config(**judged))
    assert found.message.startswith("the reward model: 11 of the model's")


def test_what_concerns_the_policy_alone_is_not_asked_of_the_critic(tmp_path):
    mixture = {**MODEL, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    replay = {"options": {"router_replay": "old-log-probs"}}
    assert keys(config(mixture, critic={"path": str(tmp_path)}, engine=replay, **PPO)) == []


def test_the_critics_weights_are_checked_under_the_critics_key(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    (found,) = MegatronBackend().configure(config(critic={"path": str(tmp_path)}, **PPO))
    assert found.key == "critic.path"
    assert found.message.startswith("the critic's model: model.safetensors")
    assert found.fix == "complete the download"


def test_a_critic_beside_adapters_is_refused():
    run = config(critic={}, **PPO)
    run = run.model_copy(update={"model": ModelSection(config=MODEL, tokenizer="t", lora={})})
    assert keys(run) == [("error", "critic")]


def test_a_critics_optimizer_is_held_against_the_distributed_one_as_well():
    run = config(critic={"optimizer": {"name": "sgd"}}, **PPO)
    assert keys(run) == [("error", "engine.distributed_optimizer")]


def test_weights_that_the_bridge_cannot_read_are_found_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    run = config().model_copy(update={"model": ModelSection(path=str(tmp_path))})
    assert keys(run) == []  # no weights at all: the core says so
    (tmp_path / "pytorch_model.bin").touch()
    assert keys(run) == [("error", "model.path")]
    save_file({}, tmp_path / "model.safetensors")
    assert keys(run) == []


def test_other_engines_are_none_of_its_business():
    assert keys(config(engine={"name": "other"}, parallel={"pipeline_model_parallel_size": 5})) == []


def test_only_training_ranks_are_patched_and_set_up():
    backend = MegatronBackend()
    platform = SimpleNamespace(redirects_torch_cuda=True, portable_modules=True)
    for role in ("driver", "rollout"):
        context = SimpleNamespace(role=role, platform=platform, hooks=None)
        assert [list(backend.patch_model(phase, context)) for phase in Phase] == [[]] * 4
        assert backend.runtime_env(ProcessInfo(role=role), config(engine={"deterministic": True})) == {}


def test_a_deterministic_run_says_so_to_transformer_engine(monkeypatch):
    """Megatron asserts the variable on every platform; see checks/training.py."""
    variable, trainer = "NVTE_ALLOW_NONDETERMINISTIC_ALGO", ProcessInfo("trainer")
    run, usual = config(engine={"deterministic": True}), config()
    assert MegatronBackend().runtime_env(trainer, run)[variable] == "0"
    assert variable not in MegatronBackend().runtime_env(trainer, usual)
    assert variable not in MegatronBackend().runtime_env(
        trainer, config(engine={"name": "other", "deterministic": True})
    )
    monkeypatch.setenv(variable, "1")
    assert keys(run) == [("error", "engine.deterministic")]
    assert keys(usual) == []


def test_the_platform_decides_on_redirection_and_portable_modules():
    def ids(*, redirects, portable):
        platform = SimpleNamespace(redirects_torch_cuda=redirects, portable_modules=portable)
        context = SimpleNamespace(engine="megatron", role="trainer", platform=platform, hooks=None)
        return {p.id for phase in Phase for p in MegatronBackend().patch_model(phase, context)}

    assert "megatron.torch-cuda" in ids(redirects=True, portable=False)
    assert "megatron.portable-transformer-engine" in ids(redirects=False, portable=True)
    assert "megatron.torch-compile" not in ids(redirects=False, portable=True)
    neither = ids(redirects=False, portable=False)
    assert neither.isdisjoint({"megatron.torch-cuda", "megatron.torch-compile", "megatron.portable-transformer-engine"})


DELTA_NET = {**MODEL, "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"] * 3,
             "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "key", "reason"),
    [
        (
            {"parallel": {"context_parallel_size": 4}},
            "parallel.context_parallel_size",
            "linear_num_key_heads 2 cannot be split over 4 ranks, tensor parallel 1 times context parallel 4",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 2, "context_parallel_size": 2}},
            "parallel.context_parallel_size",
            "linear_num_key_heads 2 cannot be split over 4 ranks, tensor parallel 2 times context parallel 2",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 4}},
            "parallel.tensor_model_parallel_size",
            "linear_num_key_heads 2 cannot be split over 4",
        ),
        ({"engine": {"deterministic": True}}, "engine.deterministic", "does not support packed sequences"),
    ],
)
def test_what_gated_delta_net_cannot_do_is_refused_with_the_reason(sections, key, reason):
    (found,) = MegatronBackend().configure(config(DELTA_NET, **sections))
    assert (found.severity, found.key) == ("error", key)
    assert reason in found.message
    assert keys(config(MODEL, **sections)) == []


def test_context_parallel_ranks_share_the_heads_of_gated_delta_net_and_of_no_other_recurrent_layer():
    parallel = {"context_parallel_size": 2}
    assert keys(config(DELTA_NET, parallel=parallel)) == []
    other = {name: value for name, value in DELTA_NET.items() if not name.startswith("linear_num")}
    (found,) = MegatronBackend().configure(config(other, parallel=parallel))
    assert (found.severity, found.key) == ("error", "parallel.context_parallel_size")
    assert "other recurrent layers" in found.message


def test_deterministic_gated_delta_net_trains_on_rows():
    assert keys(config(DELTA_NET, engine={"deterministic": True, "sequence_format": "bshd"})) == []


def test_layers_that_read_no_mask_are_not_built(monkeypatch):
    assert keys(config(DELTA_NET)) == []
    monkeypatch.setenv("USE_MCORE_GDN", "0")
    (found,) = MegatronBackend().configure(config(DELTA_NET))
    assert "get no mask" in found.message
    assert keys(config()) == []
