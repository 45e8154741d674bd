"""Rotary embeddings as published checkpoints scale them, against Hugging Face, beyond the first context length."""

import json

import pytest
import torch

from anytron.sequences.batch import RaggedBatch
from anytron_conformance.tiny_models import write_tiny_model

LENGTHS = [5, 150, 33]
SCALED = {
    # Llama 3.1 and later
    "llama3": (
        "llama",
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    # Qwen2.5 and Qwen3 with long contexts
    "yarn": (
        "qwen3",
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    # DeepSeek-V3, where the scale of the softmax changes too
    "yarn-mla": (
        "deepseek_v3",
        {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        },
    ),
    # The same without the optional fields that mcore-bridge reads as if every file had them
    "yarn-mla-bare": (
        "deepseek_v3",
        {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": None,
        },
    ),
}  # fmt: skip


def in_published_style(directory):
    """Write rotary parameters as most published files do: ``rope_scaling`` with a ``type``, ``rope_theta`` apart."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    path.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)
    tokens = torch.randint(0, 97, (total,), generator=generator)
    return RaggedBatch(torch.tensor(LENGTHS), tokens, torch.ones(total, dtype=torch.bool))


def hugging_face(directory, batch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        with torch.no_grad():
            log_softmax = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(expected)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_embeddings_agree_with_hugging_face(kind, batch, start_engine, tmp_path):
    family, rope_parameters = SCALED[kind]
    scaled = write_tiny_model(family, tmp_path / "scaled", num_hidden_layers=2, rope_parameters=rope_parameters)
    plain = write_tiny_model(family, tmp_path / "plain", num_hidden_layers=2)
    expected = hugging_face(scaled, batch)
    if family == "deepseek_v3":
        in_published_style(scaled)
        torch.testing.assert_close(hugging_face(scaled, batch), expected, atol=0, rtol=0)
    # The scaling matters: the same weights without it say something else.
    assert (expected - hugging_face(plain, batch)).abs().max() > 1e-4
    with start_engine(model={"path": str(scaled)}, engine={"max_tokens_per_micro_batch": 200}) as (workers, updates, _):
        found = workers.score(batch, updates, "policy")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


STILL = """
from anytron import hookimpl
from anytron.kernels.contract import KernelName

class Plugin:
    name = "still"

    @hookimpl
    def fused_kernel(self, name):
        return (lambda x, freqs, interleaved: x) if name is KernelName.ROPE else None
"""


def test_layers_rotate_by_the_platforms_kernel(start_engine, recorded, install_plugin):
    """One that does not rotate is noticed."""

    def scores():
        with start_engine() as (workers, updates, _):
            return workers.score(recorded, updates, "policy")

    expected = scores()
    install_plugin(STILL)
    assert (scores() - expected).abs().max() > 1e-3
