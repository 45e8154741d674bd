"""Update the adapters of one family after the other; compare log-probs with merged weights. JSON on the last line."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anytron.base.errors import AnytronError
from anytron.run.trainer.models import model_directory
from anytron_vllm.weights import AdapterDirectory
from tests.backends.vllm.programs.families import FAMILIES, PROMPTS
from tests.vllm_models import QWEN3, answers, largest_difference, log_probs, requests, run_config, send, vllm_engine

ERNIE = {**QWEN3, "model_type": "ernie4_5", "pad_token_id": 12}
CONFIGS = {"llama": FAMILIES["llama"], "qwen2": FAMILIES["qwen2"], "ernie4_5": ERNIE, "qwen3": QWEN3}
LORA = {"rank": 6, "alpha": 9.0, "rank_stabilized": True}


class Adapted:
    """An engine with adapters, and Hugging Face's model with the last one of them merged."""

    def __init__(self, family: str, directory: Path) -> None:
        config = run_config(CONFIGS[family], directory / family, LORA, lora="alone")
        self.engine, self.scaling, self.directory = vllm_engine(config), config.model.lora.scaling, directory
        self.base = AutoModelForCausalLM.from_pretrained(model_directory(config)).eval()
        self.model = self.base

    def adapter(self, seed: int) -> dict[str, torch.Tensor]:
        """Make an adapter of every linear layer, and merge it."""
        generator = torch.Generator().manual_seed(seed)
        self.model, tensors = deepcopy(self.base), {}
        for name, layer in self.model.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                a = torch.randn(6, layer.in_features, generator=generator) * 0.3
                b = torch.randn(layer.out_features, 6, generator=generator) * 0.3
                layer.weight.data += self.scaling * b @ a
                place = f"base_model.model.model.{name}"
                tensors |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
        return tensors

    def update(self, version: int) -> None:
        assert self.engine.load_adapter(send(self.adapter(version), self.directory, version)) == version

    def difference(self, model) -> float:
        asked = requests(PROMPTS, temperature=0.7)
        return largest_difference(model, asked, answers(self.engine, asked))


def main(directory: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for family in CONFIGS:
        adapted, differences = Adapted(family, directory), []
        for version in (1, 2, 3):
            before = adapted.model
            adapted.update(version)
            differences.append((adapted.difference(adapted.model), adapted.difference(before)))
        found[family] = max(one for one, _ in differences), min(other for _, other in differences)
        if family != "qwen3":
            adapted.engine.close()
    found["logits"] = logits(adapted)
    found["under way"] = under_way(adapted)
    found["damaged"] = damaged(adapted)
    found["not unloaded"] = sabotaged(adapted, adapted.engine._llm.llm_engine, "remove_lora", lambda number: True)
    found["not written"] = sabotaged(adapted, AdapterDirectory, "write", not_written)
    found["another layer"] = sabotaged(adapted, adapted, "adapter", renamed(adapted.adapter))
    adapted.engine.close()
    return found


def logits(adapted: Adapted) -> float:
    (rows,) = adapted.engine.logits([requests(PROMPTS)[0].prompt])
    with torch.no_grad():
        return float((adapted.model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1) - rows).abs().max())


def under_way(adapted: Adapted) -> tuple[list[int], float]:
    """Update the adapter after three tokens of a response; return its tokens' versions and the largest difference."""
    (asked,), old = requests([(1,) * 200], max_new_tokens=12), adapted.model
    adapted.engine.submit([asked])
    for _ in range(3):
        adapted.engine.poll(0.0)
    adapted.update(4)
    ((_, one),) = adapted.engine.poll(300.0)
    given = torch.tensor(one.log_probs).double()
    expected = [log_probs(model, asked.prompt.tokens, one.tokens) for model in (old, adapted.model)]
    return list(one.versions), float((given - torch.cat([expected[0][:3], expected[1][3:]])).abs().max())


def damaged(adapted: Adapted) -> tuple[str, bool]:
    asked, model = requests(PROMPTS), adapted.model
    before = [one.tokens for one in answers(adapted.engine, asked)]
    manifest = send(adapted.adapter(5), adapted.directory, 5)
    tensors = load_file(manifest.path)
    next(iter(tensors.values()))[0, 0] += 1.0
    save_file(tensors, manifest.path)
    said = refusal(lambda: adapted.engine.load_adapter(manifest))
    adapted.model = model
    return said, [one.tokens for one in answers(adapted.engine, asked)] == before


def sabotaged(adapted: Adapted, owner: object, name: str, replacement) -> tuple[str, str]:
    """Update the adapter with something replaced; return what is said of it, and of generating afterwards."""
    real = getattr(owner, name)
    setattr(owner, name, replacement)
    said = refusal(lambda: adapted.update(6))
    setattr(owner, name, real)
    afterwards = refusal(lambda: answers(adapted.engine, requests(PROMPTS)))
    adapted.engine.abort()
    adapted.update(7)
    assert adapted.difference(adapted.model) < 1e-4, "the next one is taken"
    return said, afterwards


def not_written(self, tensors):
    """Say what would be written, and leave the version before."""
    file = self.path / "adapter_model.safetensors"
    kept = file.read_bytes()
    sums = WRITE(self, tensors)
    file.write_bytes(kept)
    return sums


WRITE = AdapterDirectory.write


def renamed(adapter):
    """Move a tensor to a layer that the model does not have; vLLM says nothing of it."""
    return lambda seed: {name.replace(".layers.1.mlp", ".layers.9.mlp"): one for name, one in adapter(seed).items()}


def refusal(call) -> str:
    try:
        call()
    except AnytronError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
