"""A rollout model on several simulated NPUs generates what it generates on one."""

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.device.hooks.types import ProcessInfo
from anytron.device.loading import open_session
from anytron.device.patches import Ledger
from anytron.device.stack import DeviceStack
from anytron.workers.engines.context import EngineContext
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron.workers.weights.transfer import WeightManifest, checksum
from anytron_rollout.transformers_engine import TransformersEngine
from tests.backends.rollout.conftest import QWEN3, generate, run_config

PROMPTS = [PromptInputs((1, 2, 3)), PromptInputs((4, 5))]


def engine_on(session, **options):
    stack = DeviceStack(session, Ledger())
    return TransformersEngine(EngineContext(run_config(options=options), stack, ProcessInfo("rollout")))


def test_balanced_over_all_npus(tmp_path):
    torch.manual_seed(0)
    weights = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3)).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    manifest = WeightManifest(
        str(tmp_path / "weights.safetensors"), 1, {name: checksum(tensor) for name, tensor in weights.items()}
    )
    session = open_session(platform="ascend")
    one, spread = engine_on(session), engine_on(session, device_map="balanced")
    devices = {parameter.device for parameter in spread._model.parameters()}
    assert len(devices) > 1
    assert {device.type for device in devices} == {"npu"}
    for engine in (one, spread):
        engine.load_weights(manifest)
    for found, expected in zip(spread.logits(PROMPTS), one.logits(PROMPTS), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    sampling = SamplingParams(max_new_tokens=4)
    tokens = [[answer.tokens for answer in row] for row in generate(spread, PROMPTS, sampling, seed=3, samples=2)]
    assert tokens == [[answer.tokens for answer in row] for row in generate(one, PROMPTS, sampling, seed=3, samples=2)]
