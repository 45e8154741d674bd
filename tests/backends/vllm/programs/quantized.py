"""Compare log-probs of vLLM with weights in 8 bits with Hugging Face's, rounded likewise; JSON on the last line.

usage: quantized.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from anytron_rollout.quantization import quantize, quantized_weights, rounded_to_fp8
from tests.vllm_models import QWEN3, answers, hf_model, log_probs, requests, run_config, send, vllm_engine, weights_of

PROMPTS = [(3, 1, 9, 5, 10), (7, 10), (1, 2) * 60]


def rounded(model: Any) -> Any:
    """Round the weights of linear layers as the engine ``transformers`` does, and their inputs as vLLM does."""
    model = deepcopy(model)
    quantize(quantized_weights(model))
    for module in model.get_decoder().modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, arguments: (rounded_to_fp8(arguments[0]), *arguments[1:]))
    return model


def difference(model: Any, asked: list[Any], answered: list[Any]) -> float:
    """The mean difference of log-probs."""
    pairs = zip(asked, answered, strict=True)
    found = [(log_probs(model, one.prompt.tokens, two.tokens), two.log_probs) for one, two in pairs]
    each = [abs(float(one) - two) for expected, given in found for one, two in zip(expected, given, strict=True)]
    return sum(each) / len(each)


def main(directory: Path) -> dict[str, list[float]]:
    config = run_config(QWEN3, directory, quantization="fp8", dtype="bfloat16")
    engine = vllm_engine(config)
    found: dict[str, list[float]] = {"rounded": [], "not rounded": [], "before": []}
    before = hf_model(QWEN3, 9).bfloat16().float()
    for version in (1, 2, 3):
        model = hf_model(QWEN3, version).bfloat16()
        engine.load_weights(send(weights_of(model, directory / "model"), directory, version))
        model = model.float()
        asked = requests(PROMPTS, max_new_tokens=40)
        answered = answers(engine, asked)
        for name, one in (("rounded", rounded(model)), ("not rounded", model), ("before", rounded(before))):
            found[name].append(difference(one, asked, answered))
        before = model
    engine.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
