"""What can be switched on: recomputation, Adam, bfloat16, a reference model, schedules, export."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.base.errors import AnytronError, EngineError
from tests.backends.megatron.streams import assert_equals_file
from tests.slow import slow_but


def test_recomputation_chunks_and_small_micro_batches_change_nothing(follow):
    plain = follow()
    other = follow(engine={"recompute": "full", "log_prob_chunk_tokens": 3, "max_tokens_per_micro_batch": 16})
    torch.testing.assert_close(plain.log_probs, other.log_probs, atol=1e-5, rtol=1e-5)
    assert plain.grad_norms == pytest.approx(other.grad_norms, rel=1e-5)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(weight, other.weights[name], atol=1e-5, rtol=0)


def test_the_distributed_optimizer_agrees_with_the_plain_one(follow):
    adam = {"optimizer": {"name": "adam", "lr": 1e-3}}
    plain = follow(**adam)
    shared = follow(**adam, engine={"distributed_optimizer": True}, parallel={"data_parallel_size": 2})
    assert plain.grad_norms == pytest.approx(shared.grad_norms, rel=1e-4)
    for name, weight in plain.weights.items():
        # Adam divides by the gradient's size: where that is near 0, rounding decides the direction.
        assert (weight - shared.weights[name]).abs().mean() < 1e-5, name


@pytest.mark.slow
def test_bfloat16_learns_in_steps_smaller_than_bfloat16_can_show(start_engine, recorded, policy_loss):
    """Updates of 1e-6 vanish in bfloat16; they add up only in the optimizer's float32 copies."""
    with start_engine(model={"dtype": "bfloat16"}, optimizer={"name": "adam", "lr": 1e-6}) as (
        workers,
        updates,
        output,
    ):
        metrics = [workers.update(recorded, updates, policy_loss) for _ in range(40)]
        workers.export_weights(str(output / "after.safetensors"))
    assert {weight.dtype for weight in load_file(output / "after.safetensors").values()} == {torch.bfloat16}
    assert metrics[-1]["loss/policy"] < metrics[0]["loss/policy"]


def test_the_reference_model_stays_while_the_policy_moves(start_engine, recorded, policy_loss):
    with start_engine(algorithm={"kl_coefficient": 0.1}) as (workers, updates, _):
        before = workers.score(recorded, updates, "policy")
        torch.testing.assert_close(workers.score(recorded, updates, "reference"), before, atol=0, rtol=0)
        workers.update(recorded, updates, policy_loss)
        torch.testing.assert_close(workers.score(recorded, updates, "reference"), before, atol=0, rtol=0)
        assert (workers.score(recorded, updates, "policy") - before).abs().max() > 1e-3


def test_without_a_kl_coefficient_there_is_no_reference(start_engine, recorded):
    with start_engine() as (workers, updates, _), pytest.raises(AnytronError, match="no reference model"):
        workers.score(recorded, updates, "reference")


def test_the_learning_rate_follows_its_schedule(start_engine, recorded, policy_loss):
    with start_engine(
        optimizer={"name": "sgd", "lr": 0.1, "min_lr": 0.02, "schedule": "linear", "warmup_steps": 2},
        trainer={"total_steps": 6},
    ) as (workers, updates, _):
        rates = [workers.update(recorded, updates, policy_loss)["lr"] for _ in range(6)]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.08, 0.06, 0.04])


@pytest.mark.parametrize("parallel", [{}, {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}])
def test_export_equals_import_bit_for_bit(parallel, start_engine, tiny_model):
    from transformers import AutoModelForCausalLM

    original = load_file(tiny_model / "model.safetensors")
    with start_engine(parallel=parallel) as (workers, _, output):
        manifest = workers.export_weights(str(output / "now.safetensors"))
        workers.save_hf(str(output / "hf"))
    exported = load_file(output / "now.safetensors")
    assert set(exported) == set(original) == set(manifest.checksums)
    for name, weight in original.items():
        assert torch.equal(exported[name], weight), name
    model = AutoModelForCausalLM.from_pretrained(output / "hf")
    assert torch.equal(model.state_dict()["lm_head.weight"], original["lm_head.weight"])


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", {"tensor_model_parallel_size": 2}),
        ("qwen3", {"pipeline_model_parallel_size": 2}),
        ("qwen3_moe", {"data_parallel_size": 2, "expert_model_parallel_size": 2}),
        ("deepseek_v3", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_stream_through_shared_memory_gives_what_the_file_gives(start_engine, tiny_family, family, parallel, dtype):
    with start_engine(model={"path": str(tiny_family(family)), "dtype": dtype}, parallel=parallel) as (
        workers,
        _,
        output,
    ):
        assert_equals_file(workers, output)


LAYER = "model.layers.3."
DAMAGES = {
    "missing tensors": (
        lambda weights: [weights.pop(name) for name in list(weights) if name.startswith(LAYER)],
        rf"11 of the model's 47 tensors are missing: {LAYER}input_layernorm.weight, .*\.\.\.",
    ),
    # mcore-bridge would keep its random values.
    "no output layer": (
        lambda weights: weights.pop("lm_head.weight"),
        "1 of the model's 47 tensors are missing: lm_head",
    ),
    "another shape": (
        lambda weights: weights.update({f"{LAYER}mlp.down_proj.weight": torch.ones(31, 64)}),
        rf"tensors have a different shape: {LAYER}mlp.down_proj.weight has \(31, 64\), but the model needs \(32, 64\)",
    ),
    # mcore-bridge would not read it.
    "an extra tensor": (
        lambda weights: weights.update({"model.layers.1.mlp.extra.weight": torch.ones(2)}),
        "1 of 48 tensors do not belong to the model: model.layers.1.mlp.extra.weight",
    ),
}


@pytest.mark.parametrize("damage", slow_but(DAMAGES, "an extra tensor"))
def test_weights_that_do_not_fit_are_named_by_every_rank(damage, start_engine, tiny_model, tmp_path):
    """The last layers are on the second rank; the first one must not go on without it."""
    change, message = DAMAGES[damage]
    weights = load_file(tiny_model / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with (
        pytest.raises(EngineError, match=f"(?s)weights do not match.*{message}"),
        start_engine(model={"path": str(tmp_path)}, parallel={"pipeline_model_parallel_size": 2}),
    ):
        pass


def test_a_damaged_file_of_weights_is_named(start_engine, tiny_model, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:3000])
    with (
        pytest.raises(EngineError, match=r"(?s)weights do not match.*SafetensorError.*complete the download"),
        start_engine(model={"path": str(tmp_path)}),
    ):
        pass
