"""A run that asks for what the platform says it does not do is refused with the platform's reason."""

from __future__ import annotations

import pytest

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.config.schema import RunConfig
from anytron.device.platform import Feature, Limit, features_asked, limits_of
from anytron.run.preflight.limits import limit_diagnostics
from anytron.task.data.model_files import EXPERT_COUNTS
from anytron_cpu import CpuPlatform

QWEN = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}


def model(dtype="float32", **fields):
    return {"config": {**QWEN, **fields}, "tokenizer": "tokenizer", "dtype": dtype}


ASKING = {
    Feature.BSHD: ("engine.sequence_format", {"engine": {"sequence_format": "bshd"}}),
    Feature.BFLOAT16: ("model.dtype", {"model": model(dtype="bfloat16")}),
    Feature.CONTEXT_PARALLEL: ("parallel.context_parallel_size", {"parallel": {"context_parallel_size": 2}}),
    Feature.RECOMPUTE: ("engine.recompute", {"engine": {"recompute": "full"}}),
    Feature.COMPANY_INVARIANCE: ("engine.on_policy", {"engine": {"on_policy": "bitwise"}}),
    Feature.LATENT_ATTENTION: ("model.config", {"model": model(kv_lora_rank=4)}),
    Feature.MIXTURE_OF_EXPERTS: ("model.config", {"model": model(num_experts=4)}),
    Feature.LINEAR_ATTENTION: ("model.config", {"model": model(layer_types=["linear_attention"])}),
    Feature.INTERLEAVED_PIPELINE: (
        "engine.options.virtual_pipeline_model_parallel_size",
        {"engine": {"options": {"virtual_pipeline_model_parallel_size": 2}}},
    ),
    Feature.ROUTER_REPLAY: ("rollout.replay_routing", {"rollout": {"replay_routing": True}}),
    Feature.MULTI_TOKEN_PREDICTION: (
        "engine.options.mtp_loss_coefficient",
        {"engine": {"options": {"mtp_loss_coefficient": 0.1}}},
    ),
    Feature.ADAPTERS: ("model.lora", {"model": {**model(), "lora": {}}}),
    Feature.CRITIC: ("critic", {"critic": {}, "algorithm": {"advantage": "gae"}}),
}
PLAIN = {"model": model(), "data": {"source": "jsonl"}, "rewards": [{"function": "exact"}]}


class Limited(CpuPlatform):
    def limits(self):
        return [Limit(feature, "not written yet") for feature in ASKING]


@pytest.mark.parametrize("feature", ASKING, ids=lambda feature: feature.value)
def test_it_is_refused_at_its_key(feature):
    key, asking = ASKING[feature]
    (found,) = limit_diagnostics(RunConfig.model_validate({**PLAIN, **asking}), Limited())
    assert (found.severity, found.key) == ("error", key)
    assert found.message == f"the platform cpu has no {feature.value}: not written yet"


@pytest.mark.parametrize("field", EXPERT_COUNTS)
def test_experts_are_counted_under_each_name(field):
    asking = {"model": model(**{field: 4})}
    (found,) = limit_diagnostics(RunConfig.model_validate({**PLAIN, **asking}), Limited())
    assert found.message.startswith("the platform cpu has no mixture-of-experts")


def test_a_replay_of_old_log_probs_is_one_too():
    asking = {"engine": {"options": {"router_replay": "old-log-probs"}}}
    (found,) = limit_diagnostics(RunConfig.model_validate({**PLAIN, **asking}), Limited())
    assert found.key == "engine.options.router_replay"


@pytest.mark.parametrize("engine", [{}, {"options": {"router_replay": "off", "mtp_loss_coefficient": 0}}])
def test_a_run_that_asks_for_none_of_it_is_not(engine):
    assert list(limit_diagnostics(RunConfig.model_validate({**PLAIN, "engine": engine}), Limited())) == []


@pytest.mark.parametrize("wrong", ["mla", Limit("mla", "why"), Limit(Feature.BSHD, "")])
def test_a_limit_is_one_of_a_feature_with_a_reason(wrong):
    class Wrong(CpuPlatform):
        def limits(self):
            return [wrong]

    with pytest.raises(HookContractError, match="invalid entry from limits"):
        limits_of(Wrong())


def test_traits_and_sizes_ask_for_the_features_of_their_names():
    assert features_asked(ModelTraits(), ParallelSizes(data=4, sequence_parallel=True)) == []
    for trait in ("vision", "latent_attention", "linear_attention", "mixture_of_experts"):
        (found,) = features_asked(ModelTraits(**{trait: True}), ParallelSizes())
        assert found.value == trait.replace("_", "-")
    for size in ("tensor", "pipeline", "context", "expert"):
        (found,) = features_asked(ModelTraits(), ParallelSizes(**{size: 2}))
        assert found.value == f"{size}-parallel"
    assert features_asked(ModelTraits(window=(3, 0)), ParallelSizes(virtual_pipeline=2)) == [
        Feature.SLIDING_WINDOW,
        Feature.INTERLEAVED_PIPELINE,
    ]
