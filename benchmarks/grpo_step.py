"""A whole GRPO step: rollout, rewards, log-probs, update and weights to the rollout; ours against TRL's.

Both train the same model from random weights in float32, on as many prompts and samples of the same lengths, with the
same rewards, entropy bonus, learning rate and one update in a step, each as its users run it: Anytron by its command
line (a training rank and a rollout process), TRL by its GRPOTrainer in a process of its own. ``toy`` is
examples/grpo_sort.yaml: 90 thousand parameters, 32 prompts x 16 samples of up to 4 tokens. ``100m`` has the shape of a
small Qwen3, 103 million parameters of which 78 are the tied embeddings of 151,936 tokens: 16 prompts of 16 tokens x 4
samples of 16 tokens.

The runs alternate. A step's time is from its beginning to the next one's, and ``ratio`` is TRL's median by ours. The
figures without a table are our parts, and the ratios, by size. ``peak_bytes`` is the most memory that all of a side's
processes have together, measured in runs of their own: what several share counts once. That is the host's memory: with
an accelerator there is no such run, and only times are compared.

What is not the same:

- Our rollout is a second process with weights of its own, to which ``sync`` brings those of the update. TRL's trainer
  and rollout share one model.
- We sample by each response's own random numbers, keep the log-probs of what is sampled, and compare those with the
  training engine's in every step (``rollout/log_prob_abs_diff``). TRL samples by ``generate`` alone.
- Both compute entropies. Our learning rate decays, TRL's is set to stay.
- TRL's ``rollout`` holds its rewards and its tokenization, ours stand in ``reward`` and ``score``. With one update and
  no KL term neither has old log-probs to compute.
- TRL computes a step's logits at once, as is its default; we compute those of ``engine.log_prob_chunk_tokens``.

    pip install trl datasets
    python benchmarks/grpo_step.py [--json] [--peer trl|none] [--size toy|100m|both] [--steps N] [--rounds 2]
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import SUPPRESS
from dataclasses import dataclass
from pathlib import Path

from anytron.device.loading import open_session
from harness import MODEL_OF_100M, argument_parser, in_turn, progress, report, run_measured

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
PARTS = ("rollout", "reward", "score", "update", "sync", "step")


@dataclass(frozen=True)
class Size:
    """A task.

    Attributes:
        overrides: Of the example's configuration.
        steps: Training steps of a run.
        warm_up: How many of them do not count.
    """

    overrides: tuple[str, ...]
    steps: int
    warm_up: int


SIZES = {
    "toy": Size((), steps=60, warm_up=10),
    "100m": Size(MODEL_OF_100M, steps=5, warm_up=1),
}


class Anytron:
    def command(self, name, steps, folder):
        run = [f"trainer.total_steps={steps}", f"trainer.output_dir={folder / 'run'}", "trainer.save_hf=false"]
        return [sys.executable, "-m", "anytron", "train", str(EXAMPLE), *SIZES[name].overrides, *run]

    def steps(self, folder):
        """The times of each step, by the part of it."""
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [{part: line[f"time/{part}_s"] for part in PARTS} for line in lines]


class Trl:
    """In a process of its own (``--trl``): TRL changes global state of transformers."""

    def command(self, name, steps, folder):
        return [sys.executable, __file__, "--trl", str(folder), "--size", name, "--steps", str(steps)]

    def steps(self, folder):
        """The times of each step, by the part of it."""
        return json.loads((folder / "trl.json").read_text())


def run_trl(name, steps, folder):
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from anytron.config.load import load_config

    sys.path.insert(0, str(EXAMPLE.parent))
    import sort_digits

    config = load_config(EXAMPLE, list(SIZES[name].overrides))
    tokenizer = sort_digits.tokenizer()
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model.config), dtype=torch.float32)
    prompts = sort_digits.prompts(**config.data.options)

    def reward(prompts, completions, **_):
        answers = ["".join(sorted(prompt.removesuffix(sort_digits.SEPARATOR))) for prompt in prompts]
        return [
            sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)
            for answer, completion in zip(answers, completions, strict=True)
        ]

    class Clock(TrainerCallback):
        def __init__(self):
            self.steps, self.rollout, self.began = [], 0.0, 0.0

        def on_step_begin(self, *_, **__):
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *_, **__):
            now = time.perf_counter()
            step = now - self.began
            self.steps.append({"rollout": self.rollout, "update": step - self.rollout, "step": step})
            self.rollout, self.began = 0.0, now

    clock = Clock()

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            outputs = super()._generate_and_score_completions(inputs)
            clock.rollout += time.perf_counter() - start
            return outputs

    samples = config.rollout.samples_per_prompt
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        callbacks=[clock],
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=config.data.prompts_per_step * samples,
            num_generations=samples,
            max_completion_length=config.rollout.max_new_tokens,
            learning_rate=config.optimizer.lr,
            lr_scheduler_type="constant",
            entropy_coef=config.algorithm.entropy_coefficient,
            beta=0.0,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(clock.steps))


def measure(name, sides, rounds, steps, *, memory):
    """The figures of each side at one size, and what is worth a line of its own."""
    steps = steps or SIZES[name].steps
    warm_up = min(SIZES[name].warm_up, steps - 1)

    def run(side, *, memory=False):
        progress(f"{name}: {steps} steps of {side}{', its memory' if memory else ''}")
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            peak = run_measured(sides[side].command(name, steps, folder), memory=memory)
            return peak, sides[side].steps(folder)[warm_up:]

    timed = in_turn({side: lambda side=side: run(side) for side in sides}, rounds, warm_up=0)
    figures = {}
    for side, runs in timed.items():
        counted = list(itertools.chain.from_iterable(times for _, times in runs))
        figures[side] = {f"{part}_s": statistics.median(step[part] for step in counted) for part in counted[0]}
        if memory:
            figures[side]["peak_bytes"] = run(side, memory=True)[0]
    ours = figures["anytron"]
    if theirs := figures.get("trl"):
        ours["ratio"] = theirs["step_s"] / ours["step_s"]
        if ours.get("peak_bytes") and theirs.get("peak_bytes"):
            ours["peak_ratio"] = theirs["peak_bytes"] / ours["peak_bytes"]
    return figures, {f"{name}_{column}": value for column, value in ours.items()}


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--peer", choices=["trl", "none"], default="none", help="what ours is compared with")
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--steps", type=int, help="training steps of each run; default: 60 of toy, 5 of 100m")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, besides the one for its memory")
    parser.add_argument("--trl", type=Path, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl:
        run_trl(arguments.size, arguments.steps, arguments.trl)
        return
    os.environ.pop("OMP_NUM_THREADS", None)

    platform = open_session().platform
    sides = {"anytron": Anytron()} | ({"trl": Trl()} if arguments.peer == "trl" else {})
    headlines, tables = {}, {}
    for name in SIZES if arguments.size == "both" else [arguments.size]:
        tables[name], ours = measure(name, sides, arguments.rounds, arguments.steps, memory=not platform.accelerator)
        headlines |= ours
    report({**headlines, **tables}, as_json=arguments.json, runtime=platform.runtime())


if __name__ == "__main__":
    main()
