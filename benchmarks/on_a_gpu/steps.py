"""What is done on the borrowed GPU, in this order: the most important first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import figures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: For ``--only``.
        what: For ``--list``.
        limit_s: It is ended after this time.
        command: Arguments of the environment's Python. ``{folder}`` is a fresh folder of the step, ``{gpu_tests}``
            stands for the files that have tests for a GPU.
        on_gpu: Further ones on a GPU.
        on_cpu: Instead of those in a dry run.
        read: Makes figures, values that JSON knows, of the step's folder and of what it printed.
        dry_limit_s: The limit of a dry run, whose machine may be slow.
    """

    name: str
    what: str
    limit_s: int
    command: tuple[str, ...]
    on_gpu: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    read: Callable[[Path, str], object] = figures.printed
    dry_limit_s: int = 1200

    @property
    def script(self) -> str | None:
        """The file that it runs, if it is one of this tree."""
        return self.command[0] if self.command[0].endswith(".py") else None


SORT = "examples/grpo_sort.yaml"

STEPS = (
    Step(
        "tests",
        "the tests that need a GPU: pytest -m gpu",
        150,
        # Warnings of versions that nobody has tried yet are no failures.
        ("-m", "pytest", "-m", "gpu", "-W", "default", "--timeout=100", "--junitxml={folder}/junit.xml", "{gpu_tests}"),
        read=figures.tests,
    ),
    Step(
        "train_step",
        "one update of Qwen3-shaped models against a bare Megatron loop",
        150,
        ("benchmarks/train_step.py", "--json"),
        on_gpu=("--size", "0.6b"),
        on_cpu=("--size", "tiny", "--tokens", "64", "128", "--turns", "1"),
    ),
    Step(
        "grpo_sort",
        "examples/grpo_sort.yaml, shortened: GRPO learns to sort",
        120,
        ("-m", "anytron", "train", SORT, "trainer.output_dir={folder}/run"),
        on_gpu=("trainer.total_steps=300",),
        on_cpu=("trainer.total_steps=3",),
        read=figures.run,
    ),
    Step(
        "conformance",
        "anytron conformance: every rule of the kit",
        200,
        ("-m", "anytron", "conformance"),
        on_gpu=("cuda", "--json"),
        on_cpu=("cpu", "--json", "--level", "device"),
        read=figures.rules,
    ),
    Step(
        "attention",
        "every attention kernel that is there",
        90,
        ("benchmarks/attention.py", "--json"),
        on_cpu=("--repeats", "1"),
    ),
    Step(
        "log_probs",
        "log-probs without logits against the plain path",
        90,
        ("benchmarks/log_probs.py", "--json"),
        on_cpu=("--tokens", "64", "--vocabulary", "512", "--hidden", "64"),
    ),
    Step(
        "train_step_memory",
        "the memory of an update of 32768 tokens, with and without whole logits",
        90,
        ("benchmarks/train_step.py", "--json", "--plain", "--recompute", "full", "--turns", "1"),
        on_gpu=("--size", "0.6b", "--tokens", "32768"),
        on_cpu=("--size", "tiny", "--tokens", "64"),
    ),
    Step(
        "verify",
        "anytron verify: masks, weights and log-probs against independent computations",
        90,
        ("-m", "anytron", "verify", SORT, "--json", "trainer.output_dir={folder}/run"),
        read=figures.checks,
    ),
    Step(
        "grpo_step",
        "a whole GRPO step of 100 million parameters, in its parts",
        120,
        ("benchmarks/grpo_step.py", "--json", "--rounds", "1"),
        on_gpu=("--size", "100m", "--steps", "20"),
        on_cpu=("--size", "toy", "--steps", "3"),
    ),
    Step(
        "train_step_large",
        "the same update at 1.7B",
        120,
        ("benchmarks/train_step.py", "--json"),
        on_gpu=("--size", "1.7b", "--tokens", "8192", "32768", "--turns", "3"),
        on_cpu=("--size", "tiny", "--tokens", "64", "--turns", "1"),
    ),
)
"""Benchmarks that this tree does not have are passed over."""
