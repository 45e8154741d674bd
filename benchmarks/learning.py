"""What a published model learns, and how fast: ours against TRL's GRPO, on SmolLM2-135M-Instruct.

The task is that of examples/grpo_smollm2.yaml: sums and differences, a reward for the right number alone. Both sides
train all weights in float32 with the same prompts, reward function, samples of a prompt, response length, sampling,
learning rate, Adam, clipping of ratio and gradient, one update a step, and the mean over a step's tokens as loss; each as
its users run it: Anytron by its command line, TRL by its GRPOTrainer in a process of its own. The order of the prompts and
the random numbers of sampling differ, as they do between two seeds of one side.

``reward_N`` is the mean reward of the ten steps up to step N, averaged over seeds; ``spread_N`` the standard deviation of
that over seeds. ``step_s`` is the median time of a step, ``peak_bytes`` the most memory that all of a side's processes had
together. ``step_ratio`` and ``peak_ratio`` are TRL's by ours.

    python examples/smollm2.py
    pip install trl datasets
    python benchmarks/learning.py [--json] [--seeds 3] [--steps 100] [--picture FILE.svg] [--keep DIRECTORY]
"""

import json
import os
import statistics
import sys
import tempfile
import time
from argparse import SUPPRESS
from pathlib import Path

from harness import argument_parser, progress, report, run_measured

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_smollm2.yaml"
AT = (25, 50, 100)
"""Steps at which rewards are compared."""
WINDOW = 10
"""Steps that are averaged."""


class Anytron:
    def command(self, seed, steps, folder):
        own = [f"trainer.seed={seed}", f"trainer.total_steps={steps}", f"trainer.output_dir={folder / 'run'}"]
        unmeasured = ["trainer.save_hf=false", "validation=null", "checkpoint={}"]
        return [sys.executable, "-m", "anytron", "train", str(EXAMPLE), *own, *unmeasured]

    def steps(self, folder):
        """The reward and the time of each step."""
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [{"reward": line["reward/mean"], "step_s": line["time/step_s"]} for line in lines]


class Trl:
    """In a process of its own (``--trl``): TRL changes global state of transformers."""

    def command(self, seed, steps, folder):
        return [sys.executable, __file__, "--trl", str(folder), "--seed", str(seed), "--steps", str(steps)]

    def steps(self, folder):
        """The reward and the time of each step."""
        return json.loads((folder / "trl.json").read_text())


def run_trl(seed, steps, folder):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from anytron.config.load import load_config

    sys.path.insert(0, str(EXAMPLE.parent))
    import smollm2

    config = load_config(EXAMPLE, [])
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    made, rewards = [], []

    def reward(completions, answer, **_):
        scores = [
            smollm2.score(completion[0]["content"].strip(), wanted)
            for completion, wanted in zip(completions, answer, strict=True)
        ]
        rewards.append(statistics.fmean(scores))
        return scores

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_, **__):
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *_, **__):
            now = time.perf_counter()
            made.append({"reward": rewards[-1], "step_s": now - self.began})
            self.began = now

    samples = config.rollout.samples_per_prompt
    rows = [
        {"prompt": list(prompt.messages), "answer": prompt.data["answer"]}
        for prompt in smollm2.prompts(**config.data.options)
    ]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        callbacks=[Clock()],
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(folder),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=config.data.prompts_per_step * samples,
            num_generations=samples,
            max_completion_length=config.rollout.max_new_tokens,
            learning_rate=config.optimizer.lr,
            lr_scheduler_type="constant",
            loss_type="dapo",  # TRL's name of the mean over all tokens of a step
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
    (folder / "trl.json").write_text(json.dumps(made))


def up_to(rewards, step):
    return statistics.fmean(rewards[max(0, step - WINDOW) : step])


def figures_of(runs, steps):
    """The figures of one side: its runs are one for each seed, each a list of steps, and the memory."""
    found = {}
    for step in [at for at in AT if at <= steps]:
        values = [up_to([one["reward"] for one in made], step) for _, made in runs]
        found[f"reward_{step}"] = statistics.fmean(values)
        found[f"spread_{step}"] = statistics.stdev(values) if len(values) > 1 else None
    found["step_s"] = statistics.median(one["step_s"] for _, made in runs for one in made[1:])
    peaks = [peak for peak, _ in runs if peak]
    found["peak_bytes"] = max(peaks) if peaks else None
    return found


def draw(path, runs):
    """Draw the rewards of all runs: the mean over seeds, and the range between the lowest and the highest seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for side, found in runs.items():
        curves = [
            [up_to([one["reward"] for one in made], step) for step in range(1, len(made) + 1)] for _, made in found
        ]
        steps = range(1, len(curves[0]) + 1)
        axes.plot(steps, [statistics.fmean(at) for at in zip(*curves, strict=True)], label=side)
        axes.fill_between(
            steps, *zip(*((min(at), max(at)) for at in zip(*curves, strict=True)), strict=True), alpha=0.2
        )
    axes.set(xlabel="step", ylabel=f"mean reward of {WINDOW} steps", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--peer", choices=["trl", "none"], default="trl", help="what ours is compared with")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run")
    parser.add_argument("--picture", type=Path, help="draw the reward curves into this file")
    parser.add_argument("--keep", type=Path, help="keep each run's steps here, and take those that are here already")
    parser.add_argument("--trl", type=Path, help=SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl:
        run_trl(arguments.seed, arguments.steps, arguments.trl)
        return
    os.environ.pop("OMP_NUM_THREADS", None)

    sides = {"anytron": Anytron()} | ({"trl": Trl()} if arguments.peer == "trl" else {})
    runs = {side: [] for side in sides}
    for seed in range(arguments.seeds):
        for name, side in sides.items():
            runs[name].append(run(name, side, seed, arguments.steps, arguments.keep))
    table = {side: figures_of(found, arguments.steps) for side, found in runs.items()}
    headlines = {}
    if "trl" in table:
        ours, theirs = table["anytron"], table["trl"]
        headlines["step_ratio"] = theirs["step_s"] / ours["step_s"]
        if ours["peak_bytes"] and theirs["peak_bytes"]:
            headlines["peak_ratio"] = theirs["peak_bytes"] / ours["peak_bytes"]
    if arguments.picture:
        draw(arguments.picture, runs)
    report({**headlines, "side": table}, as_json=arguments.json)


def run(name, side, seed, steps, keep):
    """The most memory of a run, in bytes, and its steps."""
    kept = keep and keep / f"{name}-{seed}-{steps}.json"
    if kept and kept.exists():
        return json.loads(kept.read_text())
    progress(f"{name}: {steps} steps with seed {seed}")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        found = run_measured(side.command(seed, steps, folder), memory=True, every_s=0.5), side.steps(folder)
    if kept:
        keep.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
