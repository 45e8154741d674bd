"""The engine is written over a source of models, and imports nothing that only one source has."""

import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[4]
PROGRAM = "tests.backends.megatron.programs.model_source"

IMPORT = """
import sys
import tests.backends.megatron.without_triton
import anytron_megatron.engine
print(*sorted(sys.modules))
"""


def test_an_engine_needs_of_a_source_what_the_protocol_says(tiny_model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", PROGRAM, str(tiny_model), str(tmp_path), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "unused:"

    from transformers import AutoModelForCausalLM

    found, model = torch.load(tmp_path / "found.pt"), AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        log_probs = [model(tokens[None]).logits[0].log_softmax(-1) for tokens in found["tokens"].split([5, 3])]
    expected = [
        one[range(len(one) - 1), tokens[1:]]
        for one, tokens in zip(log_probs, found["tokens"].split([5, 3]), strict=True)
    ]
    for found_part, wanted in zip(found["log_probs"].split([5, 3]), expected, strict=True):
        torch.testing.assert_close(found_part[1:], wanted, atol=1e-5, rtol=0)
    exported, checkpoint = load_file(tmp_path / "weights.safetensors"), load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in checkpoint.items())
    assert (tmp_path / "hf" / "config.json").is_file()


def test_the_engine_imports_nothing_that_only_models_of_mcore_bridge_have():
    """An engine over other models may run on another Megatron, without mcore-bridge and without PEFT."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert "anytron_megatron.models.source" in loaded
    for module in ("mcore_bridge", "peft", "anytron_megatron.lora.adapters", "anytron_megatron.experts.router_replay"):
        assert module not in loaded
