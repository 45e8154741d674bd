"""Adapters for the tiny models, written without Anytron, and what PEFT makes of them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.task.data.pretrained import logits_config, model_class, read_hf_config

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

RANK, ALPHA = 4, 3.0
LORA = {"rank": RANK, "alpha": ALPHA, "rank_stabilized": True}
SCALING = ALPHA / RANK**0.5
SHARED = (
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"in_proj_qkvz", "in_proj_ba"},
    {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
)
"""Hugging Face layers that Megatron keeps in one: they share ``A``."""
ALONE = {"o_proj", "down_proj", "out_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
LANGUAGE = ("model.language_model.layers.", "language_model.model.layers.", "thinker.model.layers.", "model.layers.")
"""How names of the language model's layers begin: in a vision-language model's modules, and in older forms of files."""
TOWERS = ("visual.", "vision_tower.", "thinker.visual.")


def weight_of(tensor_name: str, weights: Collection[str]) -> str:
    """The weight in a file that ``base_model.model.X.lora_A.weight`` (or ``lora_B``) belongs to."""
    name = tensor_name.removeprefix("base_model.model.").replace(".lora_A.", ".").replace(".lora_B.", ".")
    forms = (name.replace(LANGUAGE[0], form) for form in LANGUAGE)
    return next((one for one in forms if one in weights), name)


def shared_group(module: str) -> str:
    """The same for all layers that share ``A``."""
    parent, _, leaf = module.rpartition(".")
    group = next((group for group in SHARED if leaf in group), {leaf})
    return f"{parent}.{'+'.join(sorted(group))}"


def write_random_adapter(model: Path, directory: Path) -> Path:
    """Write an adapter of every linear layer of a tiny model, both factors far from zero."""
    generator, first_factors, tensors = torch.Generator().manual_seed(5), {}, {}
    weights = load_file(model / "model.safetensors")
    vision = any(name.removeprefix("model.").startswith(TOWERS) for name in weights)
    for name, weight in weights.items():
        form = next((form for form in LANGUAGE if name.startswith(form)), None)
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if form is None or not any(leaf in group for group in (*SHARED, ALONE)):
            continue
        # Files may have an older form of the names, PEFT has those of the modules.
        module = (name.replace(form, LANGUAGE[0]) if vision else name).removesuffix(".weight")
        a = first_factors.setdefault(
            shared_group(module), torch.randn(RANK, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        )
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
        tensors[f"base_model.model.{module}.lora_B.weight"] = (
            torch.randn(weight.shape[0], RANK, generator=generator) * 0.05
        )
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": RANK,
                "lora_alpha": ALPHA,
                "use_rslora": True,
                # A tower's layers may have the same last parts of names.
                "target_modules": sorted(
                    {
                        name.split(".", 2)[2].rpartition(".lora_")[0] if vision else name.split(".")[-3]
                        for name in tensors
                    }
                ),
            }
        )
    )
    return directory


@pytest.fixture(scope="session")
def random_adapter(tiny_family, tmp_path_factory) -> Callable[[str], Path]:
    """Give the directory of a family's random adapter."""

    @functools.cache
    def write(family: str) -> Path:
        return write_random_adapter(tiny_family(family), tmp_path_factory.mktemp(f"lora-{family}") / "adapter")

    return write


@dataclass(frozen=True)
class Trained:
    """What a few updates of adapters on recorded trajectories leave."""

    log_probs: torch.Tensor
    grad_norms: list[float]
    adapter: dict[str, torch.Tensor]
    directory: Path
    """With ``merged.safetensors`` (as the rollout gets it), ``hf`` and ``adapter``."""


@pytest.fixture(scope="session")
def train_adapters(start_engine, tiny_family, random_adapter, recorded, policy_loss):
    """Score the recorded trajectories and do updates of the adapters, which begin as the family's random one."""

    def train(family, *, steps=3, **sections) -> Trained:
        model = {"path": str(tiny_family(family)), "lora": {**LORA, "path": str(random_adapter(family))}}
        with start_engine(**{**sections, "model": model}) as (workers, updates, output):
            log_probs = workers.score(recorded, updates, "policy")
            norms = [workers.update(recorded, updates, policy_loss)["grad_norm"] for _ in range(steps)]
            workers.export_weights(str(output / "merged.safetensors"))
            workers.save_hf(str(output / "hf"))
            workers.save_adapter(str(output / "adapter"))
        return Trained(log_probs, norms, load_file(output / "adapter" / "adapter_model.safetensors"), output)

    return train


@pytest.fixture(scope="session")
def hf_model(tiny_family):
    """Build a Hugging Face model: a family's, or one in a directory."""

    def build(family_or_directory):
        directory = tiny_family(family_or_directory) if isinstance(family_or_directory, str) else family_or_directory
        config = logits_config(read_hf_config(directory))
        return model_class(config).from_pretrained(directory, config=config, dtype=torch.float32)

    return build


@pytest.fixture(scope="session")
def peft_model(hf_model):
    """Build a family's Hugging Face model with an adapter, as a user of PEFT would."""

    def build(family, directory, **options):
        return peft.PeftModel.from_pretrained(hf_model(family), str(directory), **options)

    return build


def token_scores(model, batch):
    """Log-probs and entropies of a batch's responses, ``[T]``, by a Hugging Face model, one sequence at a time."""
    log_probs, entropies = [], []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        log_softmax = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        first = torch.zeros(1)
        log_probs += [first, log_softmax.gather(1, tokens[1:, None])[:, 0]]
        entropies += [first, -(log_softmax.exp() * log_softmax).sum(-1)]
    return torch.cat(log_probs) * batch.response_mask, torch.cat(entropies) * batch.response_mask
