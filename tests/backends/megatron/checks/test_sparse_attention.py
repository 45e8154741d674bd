"""Models with DeepSeek sparse attention: which are refused, and that the reasons are true of what is installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from anytron.config.schema import RunConfig
from anytron.device.patches.plan import in_range
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.checks import sparse_attention
from anytron_megatron.models.release import HAS_SPARSE_ATTENTION
from anytron_megatron.plugin import MegatronBackend
from tests.backends.megatron.checks.test_model import MEGATRON, refusal, remarks
from tests.backends.megatron.families.published import PUBLISHED

MODELS = ("deepseek_v32", "glm5")
SUPPORTED = in_range(MEGATRON, HAS_SPARSE_ATTENTION)
REASONS = {
    "0.16.1": "0.16.1 lacks fused_qk_topk_naive",
    "0.17.1": "the sparse attention of 0.17.1 does not support packed sequences",
    "0.18.2": "the sparse attention of 0.18.2 does not support packed sequences",
    "0.19.0": "",
    "0.19.2": "",
}


def source(package, file):
    (root,) = find_spec(package).submodule_search_locations
    return (Path(root) / file).read_text(encoding="utf-8")


@pytest.fixture
def newest(monkeypatch):
    """The checks, as with a megatron-core that has all that is needed."""
    monkeypatch.setattr(sparse_attention, "installed_version", lambda package: "0.19.2")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("version", REASONS)
def test_releases_that_lack_something_are_refused_with_what_they_lack(model, version, monkeypatch):
    monkeypatch.setattr(sparse_attention, "installed_version", lambda package: version)
    found = remarks(PUBLISHED[model])
    assert len(found) == bool(REASONS[version])
    assert all(one.severity == "error" and REASONS[version] in one.message and "0.19.2" in one.fix for one in found)


def test_the_reason_is_true_of_the_installed_release():
    dsa = source("megatron", "core/transformer/experimental_attention_variant/dsa.py")
    needed = "fused_qk_topk_naive"
    assert needed in source("mcore_bridge", "model/modules/dsa_indexer.py")
    assert (needed in dsa) == in_range(MEGATRON, ">=0.17")
    assert ("Packed sequence is not supported" in dsa) == (not SUPPORTED)
    # The class that releases before 0.19 build of; later ones build AbsorbedMLASelfAttention.
    layers = source("megatron", "core/models/gpt/experimental_attention_variant_module_specs.py")
    assert ("module=MLASelfAttention" in layers) == (not SUPPORTED)
    assert "padding_free/context parallelism" in source("mcore_bridge", "model/modules/multi_latent_attention.py")


def test_what_is_set_for_its_layers_is_what_they_need():
    config = source("megatron", "core/transformer/transformer_config.py")
    assert ("cp_comm_type=allgather only" in config) == SUPPORTED
    assert ("dsa_indexer_k_norm_epsilon: Optional[float] = None" in config) == SUPPORTED


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("deepseek_v32", {"index_head_dim": 32}, "index_head_dim is 32 and qk_rope_head_dim 8"),
        ("glm5", {"index_head_dim": 24, "qk_rope_head_dim": 12}, "a power of two"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "as if it were False"),
        ("glm5", {"indexer_rope_interleave": False}, "as if it were True"),
        ("glm5", {"index_topk_freq": 4}, "an earlier layer's indexer"),
        ("glm5", {"indexer_types": ["full", "shared"] * 2}, "an earlier layer's indexer"),
        ("glm5", {"index_topk_pattern": "FSFS"}, "an earlier layer's indexer"),
        ("deepseek_v32", {"q_lora_rank": None}, "from the compressed ones"),
        ("deepseek_v32", {"scoring_func": "softmax"}, "DeepSeek-V3.2 routes by sigmoid"),
        ("deepseek_v32", {"num_experts_per_tok": 3}, "DeepSeek-V3.2 by its 2 best"),
        ("glm5", {"norm_topk_prob": False}, "to a sum of 1"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(model, changes, says, newest):
    assert says in refusal({**PUBLISHED[model], **changes}).message


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("experimental_attention_variant", None, "without its sparse attention"),
        ("dsa_indexer_loss_coeff", 0.1, "freezes indexers"),
    ],
)
def test_options_that_would_change_what_is_trained_are_refused(option, value, says, newest):
    engine = {"options": {"transformer": {option: value}}}
    assert says in refusal(PUBLISHED["glm5"], engine=engine).message


def test_models_without_an_indexer_get_no_sparse_attention():
    engine = {"options": {"transformer": {"experimental_attention_variant": "dsa"}}}
    assert "deepseek_v3 has no indexer" in refusal(CONFIGS["deepseek_v3"], engine=engine).message


def test_adapters_are_refused_because_a_weight_is_read_without_its_layer(newest):
    model = {"config": PUBLISHED["deepseek_v32"], "tokenizer": "t", "lora": {"rank": 4}}
    sections = {"data": {"source": "s"}, "rewards": [{"function": "f"}], "rollout": {"max_new_tokens": 8}}
    (refused,) = MegatronBackend().configure(RunConfig.model_validate({"model": model, **sections}))
    assert refused.key == "model.lora"
    assert "the weight of kv_b_proj itself" in refused.message
    if SUPPORTED:
        layer = source("megatron", "core/transformer/experimental_attention_variant/absorbed_mla.py")
        assert "self.linear_kv_up_proj.weight" in layer


def test_whole_sequences_over_tensor_parallel_ranks_are_refused(newest):
    parallel = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": False}
    found = remarks(PUBLISHED["deepseek_v32"], parallel=parallel)
    assert "parallel.sequence_parallel" in {one.key for one in found if "compressed keys" in one.message}
