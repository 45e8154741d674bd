"""Update one family's weights after the other, and compare log-probs with Hugging Face's; JSON on the last line.

usage: families.py DIRECTORY FAMILY...
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from anytron.base.errors import EngineError
from anytron_vllm import transfer
from tests.vllm_models import (
    QWEN3,
    QWEN3_MOE,
    answers,
    hf_model,
    largest_difference,
    requests,
    run_config,
    send,
    vllm_engine,
    weights_of,
)

FAMILIES = {
    "llama": {**QWEN3, "model_type": "llama"},
    "qwen2": {**QWEN3, "model_type": "qwen2", "hidden_size": 128, "tie_word_embeddings": True},
    "qwen3_moe": QWEN3_MOE,
}
PROMPTS = [(3, 1, 9, 5, 10), (7, 10), (1,) * 300]


def update(engine, model, directory, version):
    """Send a model's weights; return how far the engine's log-probs are from the model's afterwards."""
    engine.load_weights(send(weights_of(model, directory / "model"), directory, version))
    asked = requests(PROMPTS, temperature=0.7)
    return largest_difference(model, asked, answers(engine, asked))


def main(directory: Path, families: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for family in families:
        config = FAMILIES[family]
        engine = vllm_engine(run_config(config, directory / family))
        found[family] = max(update(engine, hf_model(config, seed), directory, seed) for seed in (1, 2, 3))
        if family in ("qwen2", "qwen3_moe"):
            repack, transfer._repack = transfer._repack, lambda model: None
            found[f"{family} not repacked"] = update(engine, hf_model(config, 4), directory, 4)
            transfer._repack = repack
        if family == families[-1]:
            found["lost"] = lose_a_tensor(engine, config, directory)
        engine.close()
    return found


def lose_a_tensor(engine, config, directory):
    """Lose one of the tensors that were verified, on their way into vLLM's model; return what is said of it, twice."""
    load = transfer.WorkerExtension.load_anytron_weights

    def lossy(worker, weights):
        load(
            worker,
            {name: tensor for name, tensor in weights.items() if name != "model.layers.1.self_attn.q_proj.weight"},
        )

    transfer.WorkerExtension.load_anytron_weights = lossy
    said = []
    attempts = partial(update, engine, hf_model(config, 5), directory, 5), partial(answers, engine, requests(PROMPTS))
    for attempt in attempts:
        try:
            attempt()
        except EngineError as error:  # noqa: PERF203 - both are expected to fail
            said.append(str(error))
    return said


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
