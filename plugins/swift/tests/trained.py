"""Train tiny models by ``anytron-swift``, and say what transformers makes of the same data."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from anytron.task.data.pretrained import model_class
from plugins.swift.tests import pictures, words

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from transformers import PreTrainedModel

TIMEOUT_S = 300
OPTIONS = {
    "torch_dtype": "float32", "fp16": "false", "bf16": "false",
    "attention_backend": "unfused", "gradient_accumulation_fusion": "false",
    "micro_batch_size": 3, "global_batch_size": 6, "train_iters": 2, "lr": "1e-3",
    "logging_steps": 1, "save_steps": 100,
    "train_dataloader_shuffle": "false", "dataset_shuffle": "false", "split_dataset_ratio": 0,
    "dataloader_num_workers": 0, "dataset_num_proc": 1, "load_from_cache_file": "false", "add_version": "false",
    "no_save_optim": "true", "check_model": "false",
}  # fmt: skip


def source(family: str) -> ModuleType:
    """Give the module that makes a family's model and data, and knows what transformers makes of them."""
    return pictures if family in pictures.FAMILIES else words


def free_port() -> int:
    """Find a port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def train(
    directory: Path,
    model_type: str,
    *,
    name: str,
    command: str = "sft",
    ranks: int = 1,
    start: Any = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train for two steps; return what ms-swift logs of each."""
    output = directory / name
    said = {
        "model": directory / "model", "model_type": model_type, "dataset": directory / "train.jsonl",
        "output_dir": output, "template": model_type,
        **OPTIONS, **source(model_type).OPTIONS, **options,
    }  # fmt: skip
    arguments = [word for option, value in said.items() for word in (f"--{option}", str(value))]
    environment = {
        **os.environ, "ANYTRON_PLATFORM": "cpu", "NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(free_port()),
        "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore", "ANYTRON_SWIFT_REPORT": str(directory),
    }  # fmt: skip
    done = subprocess.run(
        [*(start or [sys.executable, "-m", "anytron_swift"]), command, *arguments],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=directory,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-12000:]}")
    lines = [json.loads(line) for line in (output / "logging.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "grad_norm" in line]


def transformers_model(directory: Path) -> PreTrainedModel:
    """Load the tiny model as transformers does."""
    path = directory / "model"
    model: PreTrainedModel = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # token 0 is a digit here, and has a gradient
    return model


def expected(directory: Path, family: str) -> tuple[float, float]:
    """Compute transformers' first step: mean loss of the answers' tokens, and the norm of its gradient."""
    model = transformers_model(directory)
    loss = torch.cat(source(family).answer_losses(directory, model)).mean()
    loss.backward()
    squares = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)
    return loss.item(), float(squares) ** 0.5
