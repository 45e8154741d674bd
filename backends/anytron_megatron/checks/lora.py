"""Check ``model.lora``: names of layers, and the adapter that training starts from. Imports no Megatron."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, did_you_mean
from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import composite, faults, flag, has_experts, number, read_object, whole
from anytron.task.data.weight_headers import DamagedFileError, read_header
from anytron_megatron.checks.subject import Subject
from anytron_megatron.lora.names import ALL_LINEAR, CONFIG_FILE, LAYERS, WEIGHTS_FILE
from anytron_megatron.models.families import family_of
from anytron_megatron.models.weight_files import INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import LoraSection, RunConfig
    from anytron.task.data.model_files import Kind
    from anytron_megatron.options import MegatronOptions


_PLAIN: Mapping[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "layer_replication": None,
    "trainable_token_indices": None,
}
"""Settings of PEFT that must have these values (or be absent): adapters here are plain ones, all of one rank."""

_FIELDS: Mapping[str, Kind] = {"r": partial(whole, low=1, high=2**16), "lora_alpha": number, "use_rslora": flag}
"""Types and ranges of the fields of an adapter's configuration that enter computations."""


def lora_diagnostics(run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check the names of target layers, the adapter to start from, and that the run trains nothing besides adapters."""
    section = run.model.lora
    if section is None:
        return
    policy = Subject.policy(run)
    family = family_of(policy.config)
    if family is not None and family.language_models and has_experts(policy.text):
        why = (
            f"PEFT finds experts by the model type {family.model_type}, which it takes for a model without experts: it "
            "would leave the adapters of experts out"
        )
        yield Diagnostic("error", "model.lora", why, "remove model.lora, or train a model without experts")
    if family is not None and family.model_type == "llama4":
        why = (
            "PEFT finds no experts in a llama4, whose experts transformers keeps in one tensor of a layer without "
            "renaming them: it would leave their adapters out"
        )
        yield Diagnostic("error", "model.lora", why, "remove model.lora")
    if policy.path is not None and policy.config and composite(policy.path) is not None:
        why = (
            f"{policy.path} holds more than a language model: PEFT would look for its adapters in the class of the "
            "whole model, which is code of the directory, and no test loads them there"
        )
        yield Diagnostic("error", "model.lora", why, "remove model.lora, or train the directory of a language model")
    if run.model.freeze:
        why = (
            "this key has no effect with model.lora, which freezes the whole model and trains adapters of the "
            "language model"
        )
        yield Diagnostic("error", "model.freeze", why, "remove model.freeze")
    if options.mtp_loss_coefficient > 0:
        why = (
            "this option has no effect with model.lora, which freezes the multi-token prediction modules and gives "
            "them no adapters"
        )
        yield Diagnostic("error", "engine.options.mtp_loss_coefficient", why, "remove this option")
    for target in section.targets:
        layer = target.rpartition(".")[2]
        if target != ALL_LINEAR and layer not in LAYERS:
            yield Diagnostic("error", "model.lora.targets", f"unknown layer {target!r}", _near(layer))
    if section.path is not None:
        yield from _adapter_diagnostics(section, Path(section.path))


def _near(layer: str) -> str:
    """Suggest the layer that holds this Hugging Face layer, or the one that is spelled most like it."""
    holders = [name for name, inside in LAYERS.items() if layer in inside]
    if holders:
        inside = ", ".join(LAYERS[holders[0]])
        return f"did you mean {' or '.join(holders)}? Megatron keeps {inside} in one layer"
    return did_you_mean(layer, [*LAYERS, ALL_LINEAR]) or f"use {ALL_LINEAR}, or some of {', '.join(LAYERS)}"


def _adapter_diagnostics(section: LoraSection, directory: Path) -> Iterator[Diagnostic]:
    key = "model.lora.path"
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (directory / name).is_file()]
    if missing:
        why = f"{directory} has no {' and no '.join(missing)}"
        yield Diagnostic("error", key, why, "give a directory that PEFT's save_pretrained has written")
        return
    if (directory / INDEX).exists():
        # mcore_bridge/utils/safetensors.py, _load_index: it would read the index's files instead of the checked one.
        why = f"{directory} has {INDEX}: mcore-bridge would read the files that it lists, not {WEIGHTS_FILE}"
        yield Diagnostic("error", key, why, f"remove {INDEX} from that directory")
        return
    try:
        found = read_object(directory / CONFIG_FILE)
        read_header(directory / WEIGHTS_FILE)
    except ConfigError as error:
        yield Diagnostic("error", key, f"{error.where}: {error.why}", error.fix)
        return
    except DamagedFileError as error:
        yield Diagnostic("error", key, f"{directory / WEIGHTS_FILE}: {error}", "copy the directory again")
        return
    if found_faults := [f"{field}: {fault}" for field, fault in faults(found, _FIELDS)]:
        why = f"{directory / CONFIG_FILE}: {'; '.join(found_faults)}"
        yield Diagnostic("error", key, why, "copy the directory again")
        return
    if found.get("peft_type") != "LORA":
        why = f"{directory} holds an adapter of type {found.get('peft_type')}, not LORA"
        yield Diagnostic("error", key, why, "give a LoRA adapter")
        return
    for name, wanted in _PLAIN.items():
        if found.get(name, wanted) not in (wanted, None):
            why = f"the adapter has {name}={found[name]!r}, but Anytron trains adapters with {name}={wanted!r} only"
            fix = "merge the adapter into the model (merge_and_unload in PEFT), and train a new adapter on the result"
            yield Diagnostic("error", key, why, fix)
    if found.get("r", section.rank) != section.rank:
        why = f"model.lora.rank is {section.rank}, but the adapter in model.lora.path has r={found['r']}"
        yield Diagnostic("error", "model.lora.rank", why, f"set model.lora.rank={found['r']}")
    elif not math.isclose(theirs := _scaling(found, section), ours := section.scaling):
        why = f"the adapter was trained with the scale {theirs:g}, but this configuration sets the scale {ours:g}"
        terms = ", ".join(f"{name}={found[name]}" for name in ("lora_alpha", "use_rslora") if name in found)
        yield Diagnostic(
            "error",
            "model.lora.alpha",
            why,
            f"set model.lora.alpha and model.lora.rank_stabilized as in the adapter ({terms})",
        )


def _scaling(found: Mapping[str, Any], section: LoraSection) -> float:
    """Return the scale of ``B A`` in an adapter on disk of the same rank; fields that it lacks have PEFT's defaults."""
    alpha = float(found.get("lora_alpha", 8))
    return alpha / (math.sqrt(section.rank) if found.get("use_rslora") else section.rank)
