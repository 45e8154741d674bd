"""vLLM on two processes: agreement after updates, a refused update, and what is left of it; JSON on the last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from anytron.base.errors import AnytronError
from tests.vllm_models import (
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

PROMPTS = [(3, 1, 9, 5, 10), (7, 10), (1,) * 300]


def main(directory: Path) -> dict[str, object]:
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    engine = vllm_engine(run_config(QWEN3_MOE, directory, options={"tensor_parallel_size": 2}))
    differences = []
    for seed in (1, 2):
        model = hf_model(QWEN3_MOE, seed)
        weights = weights_of(model, directory / "model")
        engine.load_weights(send(weights, directory, seed))
        asked = requests(PROMPTS, temperature=0.7)
        answered = answers(engine, asked)
        differences.append(largest_difference(model, asked, answered))
    weights.pop("model.norm.weight")
    try:
        engine.load_weights(send(weights, directory, 3))
        refused = ""
    except AnytronError as error:
        refused = str(error)
    again = answers(engine, asked)
    engine.close()
    return {
        "difference": max(differences),
        "refused": refused,
        "as before": [one.tokens for one in again] == [one.tokens for one in answered],
        "left": sorted(map(str, set(Path("/dev/shm").glob("vllm_dist_*")) - before)),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
