"""What the engine does with adapters: where they begin, the reference model, dropout, and what it refuses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.base.errors import AnytronError
from tests.backends.megatron.lora.conftest import ALPHA, LORA, RANK, token_scores
from tests.backends.megatron.streams import assert_equals_file


@pytest.fixture
def start_lora(start_engine, tiny_family):
    """Start an engine that trains adapters of a tiny model."""

    def start(family="qwen3", lora=LORA, **sections):
        return start_engine(model={"path": str(tiny_family(family)), "lora": lora}, **sections)

    return start


def test_new_adapters_change_nothing_and_are_the_reference_model_for_good(start_lora, hf_model, recorded, policy_loss):
    with torch.no_grad():
        expected, _ = token_scores(hf_model("qwen3"), recorded)
    with start_lora(algorithm={"kl_coefficient": 0.1}) as (workers, updates, _):
        before = workers.score(recorded, updates, "policy")
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=0)
        for _ in range(2):
            torch.testing.assert_close(workers.score(recorded, updates, "reference"), before, atol=0, rtol=0)
            norm = workers.update(recorded, updates, policy_loss)["grad_norm"]
            assert norm > 1e-2
        assert (workers.score(recorded, updates, "policy") - before).abs().max() > 1e-3


def test_adapters_are_merged_while_their_weights_are_streamed(start_lora, random_adapter, recorded, tiny_family):
    lora = {**LORA, "path": str(random_adapter("qwen3"))}
    with start_lora(lora=lora, parallel={"tensor_model_parallel_size": 2}) as (workers, updates, output):
        before = workers.score(recorded, updates, "policy")
        assert_equals_file(workers, output)
        torch.testing.assert_close(workers.score(recorded, updates, "policy"), before, atol=0, rtol=0)
        merged = load_file(output / "weights.safetensors")
    original = load_file(tiny_family("qwen3") / "model.safetensors")
    assert any(not torch.equal(merged[name], weight) for name, weight in original.items())


def test_adapters_are_streamed_by_themselves(start_lora, random_adapter, recorded):
    lora = {**LORA, "path": str(random_adapter("qwen3"))}
    with start_lora(lora=lora, parallel={"tensor_model_parallel_size": 2}) as (workers, updates, output):
        before = workers.score(recorded, updates, "policy")
        assert_equals_file(workers, output, part="adapter")
        torch.testing.assert_close(workers.score(recorded, updates, "policy"), before, atol=0, rtol=0)
        sent = load_file(output / "weights.safetensors")
    adapter = load_file(random_adapter("qwen3") / "adapter_model.safetensors")
    assert sent.keys() == adapter.keys()
    assert all(torch.equal(sent[name], factor) for name, factor in adapter.items())


def test_a_run_that_goes_on_from_an_adapter_has_it_for_reference(
    start_lora, random_adapter, recorded, policy_loss, tiny_family
):
    lora = {**LORA, "path": str(random_adapter("qwen3"))}
    adam = {"optimizer": {"name": "adam", "lr": 1e-2}, "engine": {"distributed_optimizer": True}}
    with start_lora(lora=lora, algorithm={"kl_coefficient": 0.1}, **adam) as (workers, updates, output):
        workers.save_adapter(str(output / "adapter"))
        before = workers.score(recorded, updates, "policy")
        workers.update(recorded, updates, policy_loss)
        moved = workers.score(recorded, updates, "policy")
        torch.testing.assert_close(workers.score(recorded, updates, "reference"), before, atol=0, rtol=0)
        torch.testing.assert_close(workers.score(recorded, updates, "policy"), moved, atol=0, rtol=0)
        assert (moved - before).abs().max() > 1e-3
    read = load_file(random_adapter("qwen3") / "adapter_model.safetensors")
    written = load_file(output / "adapter" / "adapter_model.safetensors")
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())

    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in read)
    assert config["base_model_name_or_path"] == str(tiny_family("qwen3"))
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)


def test_where_adapters_begin_follows_from_the_seed_and_not_from_the_layout(start_lora):
    split = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    begun = []
    for parallel in ({}, split):
        with start_lora("qwen3_moe", parallel=parallel) as (workers, _, output):
            workers.save_adapter(str(output / "adapter"))
        begun.append(load_file(output / "adapter" / "adapter_model.safetensors"))
    first_factors = {name: tensor for name, tensor in begun[0].items() if ".lora_A." in name}

    assert begun[0].keys() == begun[1].keys()
    assert all(torch.equal(begun[0][name], begun[1][name]) for name in begun[0])
    assert not any(tensor.any() for name, tensor in begun[0].items() if ".lora_B." in name)
    for name, a in first_factors.items():
        assert 0.9 < a.abs().max() * a.shape[1] ** 0.5 <= 1.0, name  # as PEFT begins
    distinct = {tuple(a.flatten().tolist()) for a in first_factors.values()}
    assert len(distinct) == 4 * (2 + 4 * 2)  # in each layer: attention in and out, and four experts' in and out


def test_dropout_is_for_training_only_and_the_same_when_recomputed(start_lora, random_adapter, recorded, policy_loss):
    lora = {**LORA, "path": str(random_adapter("qwen3")), "dropout": 0.5}
    runs = []
    for recompute in ("none", "full"):
        # A rate this small changes nothing: two updates differ by their dropout alone.
        sections = {"engine": {"recompute": recompute}, "optimizer": {"name": "sgd", "lr": 1e-30}}
        with start_lora(lora=lora, **sections) as (workers, updates, _):
            scores = [workers.score(recorded, updates, "policy") for _ in range(2)]
            torch.testing.assert_close(*scores, atol=0, rtol=0)
            runs.append([workers.update(recorded, updates, policy_loss)["grad_norm"] for _ in range(2)])

    assert runs[0][0] != pytest.approx(runs[0][1], rel=1e-3)
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


def test_a_layer_that_this_model_lacks_is_named_with_those_that_it_has(start_lora):
    with (
        pytest.raises(AnytronError, match=r"(?s)No layer .* 'linear_q_up_proj'.*self_attention\.linear_qkv.*did you"),
        start_lora(lora={**LORA, "targets": ["linear_qkv", "linear_q_up_proj"]}),
    ):
        pass


@pytest.mark.slow
def test_an_adapter_with_factors_that_megatron_cannot_share_is_refused(start_lora, random_adapter, tmp_path):
    shutil.copytree(random_adapter("qwen3"), tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    weights["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"] += 1.0
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with (
        pytest.raises(AnytronError, match="q_proj, k_proj and v_proj in one layer with one lora_A"),
        start_lora(lora={**LORA, "path": str(tmp_path / "adapter")}),
    ):
        pass
