"""Time of one GRPO step: Anytron against TRL, the same task on the same machine, one after the other.

Both train the Qwen3 of examples/grpo_sort.yaml on 32 prompts x 16 samples of up to 4 tokens, with the same
rewards, entropy bonus and optimizer, in float32, each as its users run it: Anytron by its command line (a
training rank and a rollout process), TRL by its GRPOTrainer in one process. The runs alternate; a step's
time is the median of all steps after the first ten.

    pip install trl datasets
    python benchmarks/against_trl.py [--json] [--steps 60] [--rounds 2]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from itertools import chain
from pathlib import Path

from harness import argument_parser, in_turn, progress, report

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
WARM_UP = 10


def anytron_steps(steps, output):
    command = [sys.executable, "-m", "anytron", "train", str(EXAMPLE)]
    overrides = [f"trainer.total_steps={steps}", f"trainer.output_dir={output / 'run'}"]
    subprocess.run(command + overrides, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["time/step_s"] for line in lines]


def trl_steps(steps, output):
    """In a process of its own (``--trl``): TRL changes global state of transformers."""
    command = [sys.executable, __file__, "--trl", str(output), "--steps", str(steps)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((output / "trl.json").read_text())


def run_trl(steps, output):
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from anytron.config.load import load_config

    sys.path.insert(0, str(EXAMPLE.parent))
    import sort_digits

    config = load_config(EXAMPLE, [])
    tokenizer = sort_digits.tokenizer()
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model.config), dtype=torch.float32)
    prompts = sort_digits.prompts(**config.data.options)

    def reward(prompts, completions, **_):
        answers = ["".join(sorted(prompt[:4])) for prompt in prompts]
        return [
            sum(a == b for a, b in zip(answer, completion, strict=False)) / 4
            for answer, completion in zip(answers, completions, strict=True)
        ]

    class Clock(TrainerCallback):
        def __init__(self):
            self.times, self.began = [], 0.0

        def on_step_begin(self, *_, **__):
            self.began = self.began or time.perf_counter()

        def on_step_end(self, *_, **__):
            now = time.perf_counter()
            self.times.append(now - self.began)
            self.began = now  # generation of the next batch happens between two steps, and belongs to one

    clock = Clock()
    samples = config.rollout.samples_per_prompt
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        callbacks=[clock],
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        args=GRPOConfig(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=config.data.prompts_per_step * samples,
            num_generations=samples,
            max_completion_length=config.rollout.max_new_tokens,
            learning_rate=config.optimizer.lr,
            entropy_coef=config.algorithm.entropy_coefficient,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
    )
    trainer.train()
    (output / "trl.json").write_text(json.dumps(clock.times))


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--trl", type=Path, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl:
        run_trl(arguments.steps, arguments.trl)
        return
    os.environ.pop("OMP_NUM_THREADS", None)

    def run(name, steps):
        progress(f"{arguments.steps} steps of {name}")
        with tempfile.TemporaryDirectory() as output:
            return steps(arguments.steps, Path(output))[WARM_UP:]

    ways = {"anytron": lambda: run("Anytron", anytron_steps), "trl": lambda: run("TRL", trl_steps)}
    rounds = in_turn(ways, arguments.rounds, warm_up=0)
    ours, theirs = (statistics.median(chain.from_iterable(rounds[name])) for name in ways)
    report({"anytron_step_s": ours, "trl_step_s": theirs, "ratio": theirs / ours}, as_json=arguments.json)


if __name__ == "__main__":
    main()
