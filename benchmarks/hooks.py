"""What hooks cost: a call through the facade, and their share of a training step.

Each hook of a micro-batch, and one that resolves a kernel, is called through ``anytron.device.hooks.facade.Hooks``
and directly on its implementation, in turn, in one run; ``facade_overhead_us`` is the largest difference
(order, contract checks). Then ``examples/grpo_sort.yaml`` is trained for real, twice: once with
``ANYTRON_TRACE_HOOKS=1``, whose lines in the trainer's log give the calls per step, once without, which
gives the time per step. ``share_of_step`` is calls times overhead by that time; ``share_of_update`` the
same by the time of the training engine alone.

    python benchmarks/hooks.py [--json] [--steps 6]
"""

import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

import torch

from anytron import hookimpl
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.device.loading.neutral import NeutralDefaults
from anytron.kernels.contract import LogProbSpec
from anytron.sequences.layout import ModelInputs
from anytron.sequences.masks import MaskKind, MaskRequest
from anytron.sequences.planning import plan_layout
from harness import argument_parser, in_turn, progress, report

CONFIG = Path(__file__).parents[1] / "examples" / "grpo_sort.yaml"


class Chained:
    """A plugin that has something to say about every micro-batch: nothing."""

    @hookimpl
    def preprocess_sequences(self, inputs):
        return inputs


def overheads_us():
    """Microseconds that the facade adds to a call, by hook."""
    plugin, defaults = Chained(), NeutralDefaults()
    hooks = hooks_of(extensions={"chained": plugin})
    layout = plan_layout([9, 5, 12])
    tokens = torch.arange(26)
    inputs = ModelInputs(layout, layout.pack(tokens), layout.position_ids, layout.next_tokens(tokens))
    sizes, accepted = ParallelSizes(), frozenset({MaskKind.NONE})
    text = MaskRequest("thd", ModelTraits(), sizes, accepted, layout)
    maps = MaskRequest("thd", ModelTraits(mixture_of_experts=True, linear_attention=True), sizes, accepted, layout)
    built = hooks.build_attn_mask(MaskRequest("thd", ModelTraits(), sizes, accepted))
    output = layout.pack(torch.randn(26, 2))
    spec = LogProbSpec(16, 1, 64)
    pairs = {
        "preprocess_sequences": (
            lambda: hooks.preprocess_sequences(inputs),
            lambda: plugin.preprocess_sequences(inputs),
        ),
        "build_attn_mask": (lambda: hooks.build_attn_mask(text, built), lambda: defaults.build_attn_mask(text)),
        "build_attn_mask with maps": (
            lambda: hooks.build_attn_mask(maps, built),
            lambda: defaults.build_attn_mask(maps),
        ),
        "postprocess_output": (
            lambda: hooks.postprocess_output(output, layout),
            lambda: defaults.postprocess_output(output, layout),
        ),
        "log_prob_kernel": (lambda: hooks.log_prob_kernel(spec), lambda: defaults.log_prob_kernel(spec)),
    }
    return {hook: difference_us(*pair) for hook, pair in pairs.items()}


def difference_us(through, direct, calls=2000, repeats=15):
    ways = {
        "through": lambda: timeit.timeit(through, number=calls),
        "direct": lambda: timeit.timeit(direct, number=calls),
    }
    # The least of each: whatever else runs on the machine only adds.
    fastest = {way: min(times) / calls * 1e6 for way, times in in_turn(ways, repeats).items()}
    return fastest["through"] - fastest["direct"]


def train(steps, folder, trace):
    progress(f"training for {steps} steps, hooks {'traced' if trace else 'not traced'}")
    output = Path(folder) / f"{steps}-{trace}"
    command = [sys.executable, "-m", "anytron", "train", str(CONFIG)]
    settings = [f"trainer.total_steps={steps}", f"trainer.output_dir={output}"]
    environment = {**os.environ, "ANYTRON_TRACE_HOOKS": str(int(trace))}
    done = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"training failed:\n{done.stdout}{done.stderr}")
    return output


def hook_calls(output):
    """Calls in the trainer's process, by hook."""
    log = (output / "logs" / "trainer-0.log").read_text(encoding="utf-8")
    return collections.Counter(re.findall(r"^anytron hook (\w+) <-", log, flags=re.MULTILINE))


def calls_per_step(folder, steps):
    """Calls of a step, without those of the build: the difference between two runs."""
    longer, shorter = (hook_calls(train(count, folder, trace=True)) for count in (steps, 1))
    calls = {hook: (longer[hook] - shorter[hook]) / (steps - 1) for hook in longer if longer[hook] > shorter[hook]}
    # No plugin of this run answers it, so the trace does not show it; it is asked before each mask.
    calls.setdefault("preprocess_sequences", calls["build_attn_mask"])
    return calls


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps of each training run, at least 2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    progress("calls through the facade")
    by_hook = overheads_us()
    with tempfile.TemporaryDirectory() as folder:
        calls = calls_per_step(folder, arguments.steps)
        records = [json.loads(line) for line in (train(arguments.steps, folder, trace=False) / "metrics.jsonl").open()]
    step_s, engine_s = (
        # The first step pays for what is made once.
        statistics.median(sum(record[name] for name in names) for record in records[1:])
        for names in (["time/step_s"], ["time/score_s", "time/update_s"])
    )
    dispatch_us = sum(count * by_hook[hook] for hook, count in calls.items())
    figures = {
        "facade_overhead_us": max(by_hook.values()),
        "dispatch_per_step_us": dispatch_us,
        "step_s": step_s,
        "share_of_step": dispatch_us * 1e-6 / step_s,
        "share_of_update": dispatch_us * 1e-6 / engine_s,
        "hooks": {hook: {"overhead_us": us, "calls_per_step": calls.get(hook)} for hook, us in by_hook.items()},
    }
    report(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
