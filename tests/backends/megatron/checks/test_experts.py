"""What is refused of a mixture of experts before an engine is built, each with its reason and a way out."""

import pytest

from anytron.config.schema import RunConfig
from anytron_megatron.plugin import MegatronBackend

DENSE = {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4,
         "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}  # fmt: skip
MIXTURE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}
TENSOR, EXPERT, EXPERT_TENSOR = (
    f"parallel.{name}_parallel_size" for name in ("tensor_model", "expert_model", "expert_tensor")
)
REPLAY = {"router_replay": "old-log-probs"}
BALANCING = "engine.options.transformer.moe_router_load_balancing_type"


def remarks(model=MIXTURE, engine=None, lora=None, replay_routing=False, **parallel):
    values = {
        "model": {"config": model, "tokenizer": "t", "lora": lora},
        "data": {"source": "s"},
        "rewards": [{"function": "f"}],
        "rollout": {"max_new_tokens": 8, "replay_routing": replay_routing},
        "engine": engine or {},
        "parallel": parallel,
    }
    return list(MegatronBackend().configure(RunConfig.model_validate(values)))


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor_model_parallel_size": 2},
        {"data_parallel_size": 2, "expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {"context_parallel_size": 2, "expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "data_parallel_size": 4, "expert_model_parallel_size": 4},
    ],
)
def test_sizes_that_megatron_computes_rightly_are_not_remarked_on(parallel):
    assert remarks(**parallel, engine={"options": REPLAY}) == []


@pytest.mark.parametrize(
    ("model", "parallel", "key", "reason", "fix"),
    [
        (
            MIXTURE,
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            EXPERT_TENSOR,
            "over data-parallel ranks only",
            "above 1",
        ),
        (
            MIXTURE,
            {"data_parallel_size": 3, "expert_model_parallel_size": 3},
            EXPERT,
            "8 experts cannot be split over 3",
            "divides 8",
        ),
        (
            {**MIXTURE, "num_experts": None, "n_routed_experts": 6},
            {"data_parallel_size": 4, "expert_model_parallel_size": 4},
            EXPERT,
            "6 experts",
            "divides 6",
        ),
        (
            MIXTURE,
            {"data_parallel_size": 2, "expert_model_parallel_size": 4},
            EXPERT,
            "the number of ranks, 2, is not a multiple of 4: expert-tensor size 1 x expert size 4 x pipeline size 1",
            "data_parallel_size",
        ),
        (
            {**MIXTURE, "moe_intermediate_size": 30},
            {"tensor_model_parallel_size": 4},
            EXPERT_TENSOR,
            "moe_intermediate_size 30",
            "divides 30",
        ),
        (
            MIXTURE,
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "parallel.sequence_parallel",
            "only together with sequence parallelism",
            "remove parallel.sequence_parallel",
        ),
        (DENSE, {"data_parallel_size": 2, "expert_model_parallel_size": 2}, EXPERT, "no experts", f"remove {EXPERT}"),
    ],
)
def test_sizes_that_cannot_work_or_compute_wrongly_are_refused(model, parallel, key, reason, fix):
    (remark,) = remarks(model, **parallel)
    assert (remark.severity, remark.key) == ("error", key)
    assert reason in remark.message
    assert fix in remark.fix


def test_a_config_without_the_number_of_experts_means_its_classs_default():
    model = {name: value for name, value in MIXTURE.items() if name != "num_experts"}  # 128
    assert remarks(model, data_parallel_size=2, expert_model_parallel_size=2) == []
    (remark,) = remarks(model, data_parallel_size=3, expert_model_parallel_size=3)
    assert "128 experts" in remark.message


@pytest.mark.parametrize(
    ("options", "key", "reason"),
    [
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, BALANCING, "each sequence"),
        ({"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}, BALANCING, "order"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, BALANCING, "counts padding"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "engine.options.router_replay", "sinkhorn"),
        ({"moe_router_fusion": True}, "engine.options.router_replay", "fused router"),
    ],
)
def test_options_that_would_not_do_what_they_say_are_refused(options, key, reason):
    (remark,) = remarks(engine={"options": {**REPLAY, "transformer": options}})
    assert (remark.severity, remark.key) == ("error", key)
    assert reason in remark.message


def test_a_load_balancing_loss_without_a_coefficient_is_nobodys_business():
    assert remarks(engine={"options": {"transformer": {"moe_router_load_balancing_type": "seq_aux_loss"}}}) == []
    per_sequence = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}
    assert remarks(engine={"options": {"transformer": per_sequence}, "sequence_format": "bshd"}) == []


def test_a_dense_model_has_no_routing_to_replay():
    (remark,) = remarks(DENSE, engine={"options": REPLAY})
    assert (remark.severity, remark.key) == ("error", "engine.options.router_replay")
    (remark,) = remarks(DENSE, replay_routing=True)
    assert (remark.severity, remark.key) == ("error", "rollout.replay_routing")


@pytest.mark.parametrize(
    ("model", "options", "key", "reason"),
    [
        (MIXTURE, REPLAY, "engine.options.router_replay", "already replays the rollout's routing"),
        ({**MIXTURE, "model_type": "gemma4"}, {}, "rollout.replay_routing", "routing of gemma4 cannot"),
        (MIXTURE, {"transformer": {"moe_router_fusion": True}}, "rollout.replay_routing", "fused router"),
        (MIXTURE, {"transformer": {"moe_expert_capacity_factor": 1.0}}, "rollout.replay_routing", "drops tokens"),
        (
            MIXTURE,
            {"transformer": {"moe_router_load_balancing_type": "sinkhorn"}},
            "rollout.replay_routing",
            "sinkhorn",
        ),
    ],
)
def test_what_cannot_repeat_the_routing_of_the_rollout_is_refused(model, options, key, reason):
    assert remarks(replay_routing=True) == []
    errors = [one for one in remarks(model, engine={"options": options}, replay_routing=True) if one.key == key]
    (remark,) = errors
    assert remark.severity == "error"
    assert reason in remark.message


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        (["all-linear"], True),
        (["linear_qkv", "linear_fc2"], True),
        (["mlp.experts.linear_fc1"], True),
        (["linear_qkv"], False),
        (["mlp.shared_experts.linear_fc1"], False),
    ],
)
def test_adapters_of_experts_are_not_split_over_tensor_parallel_ranks(targets, refused):
    found = remarks(tensor_model_parallel_size=2, lora={"rank": 4, "alpha": 8, "targets": targets})
    assert [one.key for one in found] == [EXPERT_TENSOR] * refused
