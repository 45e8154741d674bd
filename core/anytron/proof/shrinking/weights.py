"""Write a model with random weights in which a mistake shows."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from anytron.proof.shrinking.configuration import impossible
from anytron.task.data.model_files import CONFIG_FILE
from anytron.task.data.pretrained import model_class

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

MOST_PARAMETERS = 20_000_000
"""Parameters of a shrunk model: more would mean that some size was not cut."""
_GATES = (".gate_proj.weight", ".gate_up_proj")
"""Ends of the names of weights from which an activation's input is computed."""


def draw_telling_values(model: PreTrainedModel) -> None:
    """Change the parameters whose initial values would hide a mistake, with torch's generator.

    These are norms of 1, biases of 0, routers that choose by rounding error, padding that is embedded as zeros,
    heads of Gated DeltaNet that forget at every token, and inputs of a GELU near 0, where its exact form and its
    approximations are equal.
    """
    import torch

    with torch.no_grad():
        _widen_inputs_of_gelu(model)
        for name, parameter in model.named_parameters():
            if ("norm" in name or ".ln_" in name) and parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("e_score_correction_bias"):  # ERNIE-4.5's, a parameter
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.02)
            elif name.endswith("embed_tokens.weight"):  # token 0 pads: its row is zero, and so is what it leads to
                parameter[0].normal_(std=0.02)
            elif name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.05, 1.0).log())
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith(("gate.weight", "router.weight", "router.proj.weight", "sinks")):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros would choose the same experts as no bias
                bias.add_(torch.randn_like(bias) * 0.1)
            elif name.endswith("layer_scalar"):  # Gemma 4's, 1 at first
                bias.mul_(torch.empty_like(bias).uniform_(0.8, 1.2))


def _widen_inputs_of_gelu(model: PreTrainedModel) -> None:
    """Draw the weights before a language model's GELU such that its inputs are about 1, as in trained models."""
    text = model.config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    if "gelu" in str(activation):
        for name, parameter in model.named_parameters():
            if name.endswith(_GATES):
                parameter.normal_(std=text.hidden_size**-0.5)


def write_shrunk_model(fields: dict[str, Any], where: str, directory: Path, dtype: str, seed: int, kind: str) -> None:
    """Write a model with random weights; its ``config.json`` has the given fields, as published files have them.

    Args:
        fields: A configuration whose sizes were cut.
        where: Name of the published configuration in errors.
        directory: Existing directory.
        dtype: Name of the weights' element type.
        seed: Seed of the weights.
        kind: ``causal`` for a language model, ``scores`` for a classifier of sequences, such as a reward model.

    Raises:
        ConfigError: transformers refuses the configuration, or some size was not cut.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    own = deepcopy(fields)  # transformers writes into nested fields
    logging.disable_progress_bar()
    try:
        hf_config = AutoConfig.for_model(own.pop("model_type"), **own)
        auto = model_class(hf_config) if kind == "causal" else AutoModelForSequenceClassification
        with torch.device("meta"):
            _check_size(auto.from_config(hf_config), where)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(hf_config, dtype=getattr(torch, dtype))
            draw_telling_values(model)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
        raise impossible(where, f"transformers refuses the new sizes: {type(error).__name__}: {error}") from error
    model.save_pretrained(directory)
    (directory / CONFIG_FILE).write_text(json.dumps(fields, indent=1), encoding="utf-8")


def _check_size(model: PreTrainedModel, where: str) -> None:
    parameters = dict(model.named_parameters())
    total = sum(one.numel() for one in parameters.values())
    if total > MOST_PARAMETERS:
        largest = sorted(parameters, key=lambda name: -parameters[name].numel())[:3]
        shown = ", ".join(f"{name} {tuple(parameters[name].shape)}" for name in largest)
        raise impossible(where, f"some of its sizes are not known: {total} parameters would remain, such as {shown}")
