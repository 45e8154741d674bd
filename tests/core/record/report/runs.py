"""Directories of runs, as runs leave them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from anytron.config.schema import RunConfig
from anytron.record.tracking.record import RunRecord

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "]]>&amp;&#60;b&#62;",
    "\x1b[2J\x1b[31mred\x1b]0;owned\x07",
    "\x00\x08\r\n\t\x7f\x9b2J",
    "left \u202eright to left\u2066 \u2028 \u2029 \ufeff",
    "half \ud800 of a pair \udfff",
    "\\u003c/script> ${alert(1)} `x` '\"",
    "long " + "abc " * 30_000,
    "\u4e2d\u6587 \U0001f600",
)
"""What a model may write."""


def record(**more: Any) -> RunRecord:
    config = RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"total_steps": 30},
        }
    )
    return RunRecord(config=config.model_dump(mode="json"), **more)


def metrics(step: int, offset: float = 0.0) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": 1.0 - math.exp(-step / 10.0) + offset,
        "reward/std": 0.1,
        "response/length_mean": 100.0 + step,
        "policy/entropy": 2.0 / step,
        "policy/kl": 0.001 * step,
        "loss/kl": 0.0,  # as with `algorithm.kl_placement: reward`
        "rollout/log_prob_abs_diff": 1e-7 * (1.0 + step % 3),
        "grad_norm": 3.0 / step,
        "lr": 1e-6,
        "time/rollout_s": 3.0,
        "time/update_s": 1.0,
        "time/step_s": 4.5,
        "throughput/tokens_per_s": 12345.0,
        "memory/training_peak_bytes": 3.5 * 2**30,
    }


def sample(step: int, number: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": f"p{number}",
        "prompt": f"What is {number} + {step}?",
        "response": f"It is {number + step}.",
        "response_tokens": [1, 2, 3],
        "finished": number % 2 == 0,
        "reward": number / 4,
        **more,
    }


def make_run(
    path: Path,
    steps: int = 30,
    *,
    run: RunRecord | None = None,
    metrics_of: Any = metrics,
    samples_of: Any = lambda step: [sample(step, number) for number in range(4)],
) -> Path:
    """Write a finished run with so many steps, or with a record of its own."""
    (path / "logs").mkdir(parents=True)
    versions = {"python": "3.11.1", "torch": "2.13.0"}
    (run or record(finished_step=30, versions=versions)).write(path)
    patch = {"id": "megatron.x", "outcome": "applied", "target": "a:b", "reason": "it hard-codes", "detail": ""}
    worker = {"device": "Chip 9", "kernels": {"attention_kernel": "acme"}, "patches": [patch]}
    workers = {"trainer": [{"rank": rank, **worker} for rank in range(2)], "rollout": [{"engine": "transformers"}]}
    (path / "patches.json").write_text(json.dumps(workers))
    write_lines(path / "metrics.jsonl", [metrics_of(step) for step in range(1, steps + 1)])
    write_lines(path / "samples.jsonl", [one for step in range(1, steps + 1) for one in samples_of(step)])
    return path


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
