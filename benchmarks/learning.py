"""Whether a published model learns as it does with TRL: SmolLM2-135M-Instruct, sums, several seeds of each side.

Both sides take model, prompts, rewards and sizes from examples/grpo_smollm2.yaml and KEY=VALUE: one update in a step,
Adam at a constant rate, advantages divided by the group's standard deviation, no KL term, the mean over all tokens,
float32. TRL takes a GPU if torch finds one; ours, if its platform is installed. Prompts come in other orders and
samples from other random numbers, so a seed of one side has no counterpart on the other: means and spreads over seeds
are compared.

``reward_at_N`` is the mean reward of the ten steps that end with step N, and ``spread_at_N`` its sample standard
deviation over seeds. ``accuracy`` is measured alike on both sides' trained models, by greedy ``generate`` of
transformers on the sums that the example holds out. ``step_s`` is the median time of a step, ``peak_bytes`` the most
memory that all processes of a side have together, looked up once a second. ``ratio`` and ``peak_ratio`` are TRL's by
ours.

    pip install trl datasets        # and make the model as docs/tutorial/a-real-model.md says
    python benchmarks/learning.py [--json] [--seeds 3] [--steps 100] [--keep FOLDER] [--plot FILE] [KEY=VALUE ...]
"""

import json
import os
import statistics
import sys
import tempfile
from argparse import SUPPRESS
from pathlib import Path

from anytron.config.load import load_config
from harness import argument_parser, progress, report, run_measured

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_smollm2.yaml"
WINDOW = 10
MILESTONES = (25, 50, 100)
COLOURS = {"anytron": "tab:blue", "trl": "tab:orange"}
sys.path.insert(0, str(EXAMPLE.parent))


def anytron_command(steps, seed, folder, keys):
    run = [f"trainer.output_dir={folder}", f"trainer.total_steps={steps}", f"trainer.seed={seed}", "validation=null"]
    return [sys.executable, "-m", "anytron", "train", str(EXAMPLE), *keys, *run]


def anytron_result(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"rewards": [line["reward/mean"] for line in lines], "seconds": [line["time/step_s"] for line in lines]}


def trl_command(steps, seed, folder, keys):
    """In a process of its own: TRL changes global state of transformers."""
    return [sys.executable, __file__, "--trl", str(folder), "--steps", str(steps), "--seed", str(seed), *keys]


def trl_result(folder):
    return json.loads((folder / "trl.json").read_text())


SIDES = {"anytron": (anytron_command, anytron_result), "trl": (trl_command, trl_result)}


def run_trl(steps, seed, folder, keys):
    import smollm2
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = load_config(EXAMPLE, keys)
    samples = config.rollout.samples_per_prompt
    prompts = smollm2.prompts(**config.data.options)

    def reward(completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [smollm2.score(text, right) for text, right in zip(texts, answer, strict=True)]

    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt.messages, "answer": prompt.data["answer"]} for prompt in prompts]
        ),
        args=GRPOConfig(
            output_dir=str(folder),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=config.data.prompts_per_step * samples,
            num_generations=samples,
            max_completion_length=config.rollout.max_new_tokens,
            learning_rate=config.optimizer.lr,
            lr_scheduler_type="constant",
            max_grad_norm=config.optimizer.clip_grad,
            beta=0.0,
            model_init_kwargs={"dtype": torch.float32},
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
    )
    trainer.train()
    trainer.save_model(str(folder / "hf"))
    logged = [line for line in trainer.state.log_history if "reward" in line]
    made = {"rewards": [line["reward"] for line in logged], "seconds": [line["step_time"] for line in logged]}
    (folder / "trl.json").write_text(json.dumps(made))


def accuracy(model, batch=20):
    """Share of the held-out sums that a model answers rightly, taking the most probable token each time."""
    import smollm2
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = load_config(EXAMPLE, [])
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left", local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    trained.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = list(smollm2.prompts(**config.validation.sets[0].data.options))
    right = 0
    for start in range(0, len(prompts), batch):
        asked = prompts[start : start + batch]
        inputs = tokenizer.apply_chat_template(
            [prompt.messages for prompt in asked],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(trained.device)
        answers = trained.generate(**inputs, max_new_tokens=config.rollout.max_new_tokens, do_sample=False)
        texts = tokenizer.batch_decode(answers[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(smollm2.score(text, one.data["answer"]) == 1 for text, one in zip(texts, asked, strict=True))
    return right / len(prompts)


def measured(side, steps, seed, folder, keys=()):
    """A run of a side: rewards, seconds of each step, peak memory and accuracy. A run that the folder holds is read."""
    folder = folder / f"{side}-{seed}"
    kept = folder / "result.json"
    if not kept.exists():
        progress(f"{side}, seed {seed}: {steps} steps")
        folder.mkdir(parents=True, exist_ok=True)
        command, result = SIDES[side]
        peak = run_measured(command(steps, seed, folder, keys), memory=True, every_s=1.0)
        made = {**result(folder), "keys": [*keys], "peak_bytes": peak, "accuracy": accuracy(folder / "hf")}
        kept.write_text(json.dumps(made))
    made = json.loads(kept.read_text())
    if made["keys"] != [*keys]:
        sys.exit(f"error: {kept} is of a run with {made['keys']}, not {[*keys]}.\n  fix: give another --keep")
    if len(made["rewards"]) != steps:
        found = len(made["rewards"])
        sys.exit(f"error: {kept} is of {found} steps, not {steps}.\n  fix: give --steps {found}, or another --keep")
    return made


def summary(runs, steps):
    """The figures of the runs of one side."""
    milestones = [step for step in MILESTONES if step <= steps] or [steps]
    figures = {}
    for step in milestones:
        means = [statistics.fmean(run["rewards"][max(0, step - WINDOW) : step]) for run in runs]
        figures[f"reward_at_{step}"] = statistics.fmean(means)
        figures[f"spread_at_{step}"] = statistics.stdev(means) if len(means) > 1 else 0.0
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"]]
    return figures | {
        "accuracy": statistics.fmean(run["accuracy"] for run in runs),
        "step_s": statistics.median(second for run in runs for second in run["seconds"]),
        "peak_bytes": max(peaks, default=None),
    }


def draw(runs, path):
    """Draw the mean reward of ten steps, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for side, of_side in runs.items():
        for seed, run in enumerate(of_side):
            rewards = run["rewards"]
            smooth = [statistics.fmean(rewards[max(0, step - WINDOW) : step]) for step in range(1, len(rewards) + 1)]
            axes.plot(range(1, len(rewards) + 1), smooth, COLOURS[side], label=side if seed == 0 else None)
    axes.set(xlabel="step", ylabel=f"mean reward of {WINDOW} steps")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs; runs that are in it are not made again")
    parser.add_argument("--plot", type=Path, help="draw the rewards of all runs into this file")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the example to set, on both sides")
    parser.add_argument("--trl", type=Path, help=SUPPRESS)
    parser.add_argument("--seed", type=int, help=SUPPRESS)
    arguments = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    if arguments.trl:
        run_trl(arguments.steps, arguments.seed, arguments.trl, arguments.keys)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        runs = {side: [] for side in SIDES}
        for seed in range(arguments.seeds):
            for side, made in runs.items():
                made.append(measured(side, arguments.steps, seed, folder, arguments.keys))
    figures = {side: summary(made, arguments.steps) for side, made in runs.items()}
    ours, theirs = figures["anytron"], figures["trl"]
    headlines = {"ratio": theirs["step_s"] / ours["step_s"]}
    if ours["peak_bytes"] and theirs["peak_bytes"]:
        headlines["peak_ratio"] = theirs["peak_bytes"] / ours["peak_bytes"]
    if arguments.plot:
        draw(runs, arguments.plot)
    report({**headlines, "side": figures}, as_json=arguments.json)


if __name__ == "__main__":
    main()
