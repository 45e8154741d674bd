"""A model of verl's, and ranks that run a program with it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.verl.tests.by_path import load

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before Megatron is imported, which would import torch's compiler
PROGRAMS = Path(__file__).parent / "programs"
HAS_SIMULATOR = importlib.util.find_spec("anytron_ascend_simulator") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None
SKIPPED = {"npu_simulator": 0 if HAS_SIMULATOR else 9, "vllm": 0 if HAS_VLLM else 4}
"""How many tests of the whole suite skip, by the marker that says what they need."""


def pytest_configure(config: pytest.Config) -> None:
    skips = load("skips.py").Skips(SKIPPED, counted=True, where="plugins/verl/tests/conftest.py")
    config.pluginmanager.register(skips, "skips")
    if HAS_SIMULATOR:
        from anytron_ascend_simulator import activate
        from anytron_ascend_simulator.build import build

        build()
        activate()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("npu_simulator") and not HAS_SIMULATOR:
        pytest.skip("needs torch_npu on the simulator: tox -e verl-ascend")
    if item.get_closest_marker("vllm") and not HAS_VLLM:
        pytest.skip("needs vLLM for processors: tox -e verl-vllm")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random Qwen3 of 2 layers in float32, whose logits are far from equal, with a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, dtype="float32",
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    network = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
    network.save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, 256)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def ranks():
    """Run a program on several ranks of this machine; give the JSON of the first."""

    def run(program, *arguments, tensor=1, context=1, **variables):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            **os.environ, "ANYTRON_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "WORLD_SIZE": str(tensor * context), "TENSOR": str(tensor), "CONTEXT": str(context), **variables,
        }  # fmt: skip
        command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
        started = [
            subprocess.Popen(
                command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(tensor * context)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=1200) for process in started]
        finally:
            for process in started:
                process.kill()
        report = "\n".join(f"rank {rank}: {errors[-3000:]}" for rank, (_, errors) in enumerate(outputs))
        assert [process.returncode for process in started] == [0] * len(started), report
        return json.loads(outputs[0][0].splitlines()[-1])

    return run
