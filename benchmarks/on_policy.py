"""What ``engine.on_policy=bitwise`` costs: a whole GRPO step with company-invariant kernels against the usual ones.

Both train examples/grpo_sort.yaml, by the command line, with ``rollout.engine=megatron`` on one rank: ``toy`` with 90
thousand parameters, ``100m`` with 103 million, of which 78 are the tied embeddings of 151,936 tokens (16 prompts of 16
tokens x 4 samples of 16 tokens). The runs alternate. ``ratio`` is the median step of ``bitwise`` by that of ``close``;
``rollout_ratio`` and ``update_ratio`` are those of its parts. A run whose log-probs differ by any bit in mode
``bitwise`` ends the benchmark.

    python benchmarks/on_policy.py [--json] [--size toy|100m] [--dtype float32|bfloat16] [--steps N] [--rounds 2]
"""

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from harness import MODEL_OF_100M, argument_parser, in_turn, progress, report, run_measured

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_sort.yaml"
SIZES = {"toy": (), "100m": MODEL_OF_100M}
PARTS = ("rollout", "update", "step")
WARM_UP = 1
"""Steps of a run that do not count."""


def steps_of(mode, options):
    """Train in one mode; return the metrics of each step that counts."""
    progress(f"{options.size}, {options.dtype}: {options.steps} steps, on_policy={mode}")
    with tempfile.TemporaryDirectory() as folder:
        overrides = (
            *SIZES[options.size],
            f"model.dtype={options.dtype}",
            f"engine.on_policy={mode}",
            "rollout.engine=megatron",
            f"trainer.total_steps={options.steps}",
            f"trainer.output_dir={folder}/run",
            "trainer.save_hf=false",
            "checkpoint.keep=0",
        )
        run_measured([sys.executable, "-m", "anytron", "train", str(EXAMPLE), *overrides], memory=False)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][WARM_UP:]
    if mode == "bitwise" and any(step["rollout/log_prob_abs_diff"] for step in steps):
        raise SystemExit("rollout and training differ: the mode does not do what it promises")
    return steps


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    runs = in_turn(
        {mode: lambda mode=mode: steps_of(mode, options) for mode in ("close", "bitwise")}, options.rounds, warm_up=0
    )
    table = {}
    for mode, found in runs.items():
        steps = list(itertools.chain.from_iterable(found))
        table[mode] = {f"{part}_s": statistics.median(step[f"time/{part}_s"] for step in steps) for part in PARTS}
        table[mode]["log_prob_abs_diff"] = max(step["rollout/log_prob_abs_diff"] for step in steps)
    ratios = {part: table["bitwise"][f"{part}_s"] / table["close"][f"{part}_s"] for part in PARTS}
    report(
        {
            "step": table,
            "ratio": ratios["step"],
            "rollout_ratio": ratios["rollout"],
            "update_ratio": ratios["update"],
        },
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
