"""Megatron's models, built of the portable modules on the real redirection, give Hugging Face's logits."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from anytron.base.errors import ConfigError


def make_model(family: str, folder):
    import transformers

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    own = {
        "Qwen3": {"head_dim": 16},
        "Qwen2": {"tie_word_embeddings": True},
        "Llama": {},
        # Attention sinks, and every other layer sees 4 of the 8 positions.
        "GptOss": {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "pad_token_id": 0,
        },
    }[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **own)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():  # norms of 1 and biases of 0 would hide one that is applied in the wrong place
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("norm", "bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        ids = torch.randint(0, 96, (3, 8))
        logits = model(ids).logits
    model.save_pretrained(folder)
    torch.save({"ids": ids, "logits": logits}, folder / "expected.pt")


FAMILIES = {1: ("Qwen3", "Qwen2", "Llama", "GptOss"), 2: ("Qwen3",)}
"""By the tensor-parallel size."""


@pytest.fixture(scope="module")
def compared(run_program, tmp_path_factory):
    """What the program says of all families that run on as many ranks: importing Megatron takes longer than they."""

    @functools.cache
    def compare(ranks):
        folders = [tmp_path_factory.mktemp("parity") / family for family in FAMILIES[ranks]]
        for folder in folders:
            make_model(folder.name, folder)
        output = run_program("megatron_parity.py", str(ranks), *map(str, folders), ranks=ranks)
        return json.loads(output.splitlines()[-1])

    return compare


@pytest.mark.some(2)
@pytest.mark.parametrize(("ranks", "family"), [(ranks, family) for ranks in FAMILIES for family in FAMILIES[ranks]])
def test_packed_and_padded_logits_are_hugging_faces(compared, ranks, family):
    found = compared(ranks)[family]
    assert len(found["differences"]) == 2
    assert max(found["differences"]) < 1e-6, found
    assert found["without gradient"] == []


@pytest.mark.some(1)
@pytest.mark.parametrize("order", ["first", "last"])
def test_peft_accelerate_and_transformers_beside_a_model(run_program, tmp_path, order):
    make_model("Qwen3", tmp_path)
    assert "fine" in run_program("beside_others.py", str(tmp_path), order)


def test_eight_bit_training_is_refused_when_the_engine_is_built(start_engine):
    with (
        pytest.raises(ConfigError, match=r"(?s)cannot train with fp8=hybrid.*has no FP8.*bfloat16"),
        start_engine(engine={"options": {"transformer": {"fp8": "hybrid"}}}),
    ):
        pass
