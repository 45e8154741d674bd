"""Make what verl's trainer reads: a directory with a tiny Qwen3 of random weights and its tokenizer, and prompts.

Run as: prepare.py DIRECTORY DIGITS [HEAD_SIZE]. The task is that of ../sort_digits.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import sort_digits

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""verl's agent loops know chats only: a prompt is the text of its messages."""


def save_model(path: Path, head_size: int) -> None:
    tokenizer = sort_digits.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_size, max_position_embeddings=64, tie_word_embeddings=False,
        dtype="bfloat16", bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def save_prompts(path: Path, count: int, digits: int, seed: int) -> None:
    rows = [
        {
            "data_source": "sort_digits",
            "prompt": [{"role": "user", "content": prompt.text}],
            "reward_model": {"style": "rule", "ground_truth": prompt.data["answer"]},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(sort_digits.prompts(count, digits, seed))
    ]
    pd.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    directory, digits = Path(sys.argv[1]), int(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    save_model(directory / "model", int(sys.argv[3]) if len(sys.argv) > 3 else 16)
    save_prompts(directory / "train.parquet", 4096, digits, seed=0)
    save_prompts(directory / "validation.parquet", 64, digits, seed=1)
