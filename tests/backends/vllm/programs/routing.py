"""Compare the experts that vLLM records with those of Hugging Face's router, token by token; JSON on the last line.

usage: routing.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.chosen_experts import chosen_by
from tests.vllm_models import QWEN3_MOE, answers, hf_model, requests, run_config, send, vllm_engine, weights_of

MODEL = {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 3}
"""The layer in the middle is dense."""
SHARED = tuple(place % 10 for place in range(160))
PROMPTS = [(3, 1, 9, 5, 10), (7, 10), (*SHARED, 10), (*SHARED, 10), (*SHARED, 4, 4, 10)]
"""The long ones share blocks of the prefix cache."""


def differing(model: Any, asked: list[Any], answered: list[Any]) -> int:
    """Count the tokens that the engine says went to other experts than Hugging Face's router chooses."""
    count = 0
    for request, response in zip(asked, answered, strict=True):
        expected = chosen_by(model, (*request.prompt.tokens, *response.tokens))[:-1]
        told = response.routing.long().sort(-1).values
        assert told.shape == expected.shape, f"{tuple(told.shape)}, expected {tuple(expected.shape)}"
        assert response.routing.dtype is torch.uint8
        count += int((told != expected).any(-1).any(-1).sum())
    return count


def main(directory: Path) -> dict[str, object]:
    # Few blocks: vLLM computes some of the first responses again from their beginning.
    options = {"engine_args": {"block_size": 32}, "kv_cache_gib": 0.0006, "max_model_len": 256}
    config = run_config(MODEL, directory, replay_routing=True, options=options)
    engine = vllm_engine(config)
    models = [hf_model(MODEL, seed) for seed in (1, 2)]

    def update(version: int) -> Any:
        model = models[version % 2]
        engine.load_weights(send(weights_of(model, directory / "model"), directory, version))
        return model

    found: dict[str, object] = {}
    preempted = count_preemptions(engine)
    model = update(1)
    asked = requests(PROMPTS * 4, max_new_tokens=60)
    found["differing"] = [differing(model, asked, answers(engine, asked)) for _ in range(2)]
    found["preempted"] = len(preempted)
    preempted.clear()

    asked = requests(PROMPTS, max_new_tokens=24, stop=("1", "2"), min_new_tokens=2)
    stopped = answers(engine, asked)
    found["stopped"] = [one.stop_reason for one in stopped]
    found["differing before a stop string"] = differing(model, asked, stopped)

    model = update(2)
    asked = requests(PROMPTS)
    found["differing after an update"] = differing(model, asked, answers(engine, asked))
    found["of other weights"] = differing(models[1], asked, answers(engine, asked))
    found["continued"] = continued(engine, models, update)
    engine.close()
    return found


def continued(engine: Any, models: list[Any], update: Any) -> list[int]:
    """Update the weights after three tokens; count differences before, and from the first token of the new ones on."""
    asked = requests(PROMPTS[:3], max_new_tokens=12)
    engine.submit(asked)
    for _ in range(3):
        engine.poll(0.0)
    update(3)
    answered: dict[int, Any] = {}
    while len(answered) < len(asked):
        answered |= dict(engine.poll(1.0))
    counts = [0, 0]
    for request in asked:
        response, length = answered[request.id], len(request.prompt.tokens)
        sequence = (*request.prompt.tokens, *response.tokens)
        before = list(response.versions).index(3) + length - 1  # rows: one for each token before the one that it draws
        told = response.routing.long().sort(-1).values
        for place, model in enumerate((models[0], models[1])):
            rows = slice(0, before) if place == 0 else slice(before, None)
            counts[place] += int((told[rows] != chosen_by(model, sequence)[:-1][rows]).any(-1).any(-1).sum())
        assert 0 < before - length + 1 < len(response.tokens)
    return counts


def count_preemptions(engine: Any) -> list[str]:
    """Return a list to which the scheduler appends each request that it will compute again."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    real, found = scheduler._preempt_request, []

    def preempt(request: Any, *arguments: Any, **named: Any) -> Any:
        found.append(request.request_id)
        return real(request, *arguments, **named)

    scheduler._preempt_request = preempt
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
