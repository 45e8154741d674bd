"""However the work is split, the same trajectories give the same numbers (design, section 6)."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file

from tests.slow import slow_but

GPU = torch.cuda.device_count() > 0 and importlib.util.find_spec("anytron_cuda") is not None

SPLITS = {
    "bshd": {"engine": {"sequence_format": "bshd"}},
    "tp2-sp": {"parallel": {"tensor_model_parallel_size": 2}},
    "tp2-sp-bshd": {"parallel": {"tensor_model_parallel_size": 2}, "engine": {"sequence_format": "bshd"}},
    "tp2": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": False}},
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "pp2-bshd": {"parallel": {"pipeline_model_parallel_size": 2}, "engine": {"sequence_format": "bshd"}},
    "pp2-interleaved": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}},
    },
    "dp2": {"parallel": {"data_parallel_size": 2}},
    "cp2": {"parallel": {"context_parallel_size": 2}},
    "cp2-bshd": {"parallel": {"context_parallel_size": 2}, "engine": {"sequence_format": "bshd"}},
    "tp2-sp-cp2": {"parallel": {"tensor_model_parallel_size": 2, "context_parallel_size": 2}},
    "tp2-sp-cp2-bshd": {
        "parallel": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        "engine": {"sequence_format": "bshd"},
    },
}
QUICK = ("bshd", "tp2-sp", "pp2-interleaved", "dp2", "cp2-bshd")


def differences(one, other):
    """Largest relative differences of log-probs and gradient norms, largest absolute one of weights."""
    relative = (one.log_probs - other.log_probs).abs() / one.log_probs.abs().clamp(min=1.0)
    norms = [abs(a - b) / a for a, b in zip(one.grad_norms, other.grad_norms, strict=True)]
    weights = [(one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights]
    return {"log_probs": relative.max().item(), "grad_norm": max(norms), "weights": max(weights)}


@pytest.fixture(scope="module")
def one_rank(follow):
    """On the processor, with no GPU in sight."""
    with pytest.MonkeyPatch.context() as patches:
        if GPU:
            patches.setenv("CUDA_VISIBLE_DEVICES", "")
        return follow()


def test_one_rank_scores_as_hugging_face_does(one_rank, recorded, tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = []
    for tokens in recorded.tokens.split(recorded.lengths.tolist()):
        with torch.no_grad():
            log_softmax = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]))
    of_responses = torch.cat(expected) * recorded.response_mask
    torch.testing.assert_close(one_rank.log_probs, of_responses, atol=1e-5, rtol=1e-5)


def test_updates_moved_the_weights(one_rank, tiny_model):
    before = load_file(tiny_model / "model.safetensors")
    assert set(before) == set(one_rank.weights)
    assert all(norm > 1e-2 for norm in one_rank.grad_norms), one_rank.grad_norms
    moved = {name: (before[name] - one_rank.weights[name]).abs().max().item() for name in before}
    # The tolerance below is 1e-5: what an update does must be far above it.
    assert min(moved.values()) > 1e-4, moved


@pytest.mark.some(2)
@pytest.mark.parametrize("split", slow_but(SPLITS, *QUICK))
def test_a_split_agrees_with_one_rank(split, one_rank, follow):
    found = differences(one_rank, follow(**SPLITS[split]))
    assert found["log_probs"] <= 1e-5, found
    assert found["grad_norm"] <= 1e-5, found
    assert found["weights"] <= 1e-5, found


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU, and anytron-cuda installed")
@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_a_gpu_agrees_with_the_processor(sequence_format, one_rank, follow, monkeypatch):
    # Products of TF32 would be 1e-3 off. Portable modules have none, unless NVIDIA's containers set this variable.
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False)
    cuda = {"name": "cuda", "options": {"modules": "portable"}}
    found = differences(one_rank, follow(platform=cuda, engine={"sequence_format": sequence_format}))
    assert found["log_probs"] <= 1e-4, found
    assert found["grad_norm"] <= 1e-4, found
    assert found["weights"] <= 5e-5, found


@pytest.mark.slow
def test_a_broken_all_reduce_is_noticed(one_rank, follow, write_extension):
    """A tensor-parallel sum that forgets the other ranks."""
    write_extension("megatron.core.tensor_parallel.mappings:_reduce", "lambda original: lambda x, group=None: x")
    found = differences(one_rank, follow(**SPLITS["tp2"]))
    assert found["log_probs"] > 1e-3, found
    assert found["grad_norm"] > 1e-3, found
    assert found["weights"] > 1e-4, found
