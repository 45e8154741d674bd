"""Models of Mamba-2, attention and experts: which are refused, and that the reasons are true of what is installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from anytron.config.schema import RunConfig
from anytron.device.patches.plan import in_range
from anytron_megatron.checks import hybrid
from anytron_megatron.models.release import HAS_MAMBA
from anytron_megatron.plugin import MegatronBackend
from tests.backends.megatron.checks.test_model import MEGATRON, refusal, remarks
from tests.backends.megatron.families.published import PUBLISHED

MODEL = PUBLISHED["nemotron3"]
SUPPORTED = in_range(MEGATRON, HAS_MAMBA)
REASONS = {
    "0.16.1": "0.16.1 lacks HybridModel",
    "0.17.1": "0.17.1 lacks HybridModel",
    "0.18.2": "the layers of 0.18.2 hold their convolution in a module",
    "0.19.0": "",
    "0.19.2": "",
}


def source(package, file):
    (root,) = find_spec(package).submodule_search_locations
    return (Path(root) / file).read_text(encoding="utf-8")


@pytest.fixture
def newest(monkeypatch):
    """The checks, as with a megatron-core that has all that is needed."""
    monkeypatch.setattr(hybrid, "installed_version", lambda package: "0.19.2")


@pytest.mark.parametrize("version", REASONS)
def test_releases_that_lack_something_are_refused_with_what_they_lack(version, monkeypatch):
    monkeypatch.setattr(hybrid, "installed_version", lambda package: version)
    found = remarks(MODEL)
    assert len(found) == bool(REASONS[version])
    assert all(one.severity == "error" and REASONS[version] in one.message and "0.19.2" in one.fix for one in found)


def test_the_reason_is_true_of_the_installed_release():
    (root,) = find_spec("megatron").submodule_search_locations
    assert (Path(root) / "core/models/hybrid").is_dir() == in_range(MEGATRON, ">=0.18")
    assert ("self.conv1d_weight = " in source("megatron", "core/ssm/mamba_mixer.py")) == SUPPORTED
    builds = source("mcore_bridge", "model/gpts/nemotron_h.py")
    assert "if _HYBRID_MODEL_AVAILABLE:" in builds
    assert "'conv1d_weight', hf_state_dict, 'conv1d.weight'" in builds


@pytest.mark.parametrize(
    "fields",
    [
        {"hybrid_override_pattern": "ME*M*EM-"},
        {"hybrid_override_pattern": None, "layers_block_type": ["linear_attention", "mlp"] * 4},
        {"hybrid_override_pattern": None},
    ],
)
def test_dense_layers_are_refused(fields, newest):
    assert "dense MLPs" in refusal({**MODEL, **fields}).message
    branches = source("mcore_bridge", "model/gpts/nemotron_h.py").split("def _set_layer_mlp(")[1].split("def ")[0]
    assert "'moe'" in branches
    assert "'mlp'" not in branches


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("conv_kernel", 3, "convolve 4 tokens"),
        ("layer_norm_epsilon", 1e-6, "adds 1e-5"),
        ("use_conv_bias", False, "has a bias"),
        ("use_bias", True, "no bias"),
        ("mlp_bias", True, "without a bias"),
        ("mamba_hidden_act", "gelu", "SiLU"),
        ("mlp_hidden_act", "silu", "the square of ReLU"),
        ("moe_latent_size", 32, "no projections around the experts"),
        ("residual_in_fp32", True, "add in float32"),
        ("sliding_window", 4, "a window"),
        ("tie_word_embeddings", True, "tie the embeddings"),
        ("norm_topk_prob", False, "to a sum of 1"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(name, value, says, newest):
    assert says in refusal({**MODEL, name: value}).message


def test_what_megatron_and_the_bridge_fix_is_fixed_there():
    mixer = source("megatron", "core/ssm/mamba_mixer.py")
    assert "d_conv=4" in mixer
    assert "eps=1e-5" in mixer
    assert "assert not bias" in mixer
    if SUPPORTED:
        assert "assert conv_bias" in mixer
    builds = source("mcore_bridge", "model/gpts/nemotron_h.py")
    assert "latent" not in builds
    parser = source("mcore_bridge", "config/parser.py")
    assert "res['activation_func'] = squared_relu" in parser
    assert "'fp32_residual_connection': ['residual_in_fp32']" in parser
    assert "'window_size': ['sliding_window']" in parser
    layers = source("transformers", "models/nemotron_h/modeling_nemotron_h.py")
    assert "_tied_weights_keys = {}" in layers
    assert "residual_in_fp32" not in layers
    assert "sliding_window" not in layers


@pytest.mark.parametrize(
    ("sections", "key", "says"),
    [
        ({"parallel": {"tensor_model_parallel_size": 2}}, "expert_tensor_parallel_size", "as one matrix"),
        (
            {"parallel": {"pipeline_model_parallel_size": 2}, "engine": {"virtual_pipeline_model_parallel_size": 2}},
            "virtual_pipeline_model_parallel_size",
            "from a pattern that names them",
        ),
        ({"parallel": {"context_parallel_size": 8}}, "context_parallel_size", "n_groups 4 cannot be split over 8"),
        ({"model": {"lora": {"rank": 4}}}, "model.lora", "no test compares adapters"),
        ({"critic": {}, "algorithm": {"advantage": "gae"}}, "critic", "no head with one output"),
    ],
)
def test_layouts_and_roles_that_would_be_wrong_are_refused(sections, key, says, newest):
    model = {"config": MODEL, "tokenizer": "t", **sections.get("model", {})}
    given = {"data": {"source": "s"}, "rewards": [{"function": "f"}], "rollout": {"max_new_tokens": 8}}
    engine = {"options": sections.get("engine", {})}
    run = RunConfig.model_validate({**given, **sections, "model": model, "engine": engine})
    found = [one for one in MegatronBackend().configure(run) if says in one.message]
    assert [one.severity for one in found] == ["error"]
    assert found[0].key.endswith(key)


def test_the_reasons_for_these_refusals_still_hold():
    builds = source("mcore_bridge", "model/gpts/nemotron_h.py")
    joined = builds.split("tp_key = 'linear_fc1_up.weight' if mg_name == 'linear_fc1'")[1]
    assert "weight = torch.concat([" in joined.split("is_expert=True)")[0]
    assert "task_type" not in source("mcore_bridge", "model/hybrid_model.py")
    if SUPPORTED:
        stages = source("megatron", "core/models/hybrid/hybrid_layer_allocation.py")
        assert "Virtual pipeline parallelism (vp_stage != None) is not supported" in stages
