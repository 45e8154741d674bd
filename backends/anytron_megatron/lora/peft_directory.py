"""Adapters in PEFT's format: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from anytron.base.errors import EngineError
from anytron.base.files import exhausted
from anytron_megatron.lora.names import WEIGHTS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from anytron.config.schema import LoraSection

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight")
_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")
_RENAMED = ("gate_proj", "up_proj", "down_proj")
"""In mixtures of experts PEFT applies a target of these names to the experts only
(peft 0.20.0, utils/transformers_weight_conversion.py, ``_convert_peft_config_moe``)."""


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], section: LoraSection, *, base: Path, experts: bool, vision: bool
) -> None:
    """Write an adapter so that ``peft.PeftModel.from_pretrained`` loads it.

    Args:
        directory: Output directory; created if it does not exist.
        tensors: ``lora_A`` and ``lora_B`` under PEFT's names.
        section: ``model.lora``.
        base: Directory of the model that the adapter belongs to.
        experts: Whether the model has experts.
        vision: Whether the model has a vision tower, whose layers may have the same last parts of names as the
            language model's.
    """
    from peft import LoraConfig

    modules, parameters = peft_targets(tensors, experts=experts, vision=vision)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS_FILE)
    LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
        inference_mode=True,
        r=section.rank,
        # With rsLoRA PEFT multiplies the outputs of experts by sqrt(2) too much: it keeps gate_proj and up_proj in
        # one adapter of twice the rank and twice the alpha. So the same factor is written as alpha / rank.
        lora_alpha=section.scaling * section.rank if experts else section.alpha,  # type: ignore[arg-type]
        use_rslora=section.rank_stabilized and not experts,
        # PEFT refuses dropout where it adapts parameters instead of modules.
        lora_dropout=0.0 if experts else section.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
    ).save_pretrained(str(directory))


def peft_targets(names: Iterable[str], *, experts: bool, vision: bool) -> tuple[list[str], list[str]]:
    """Return the layers of an adapter's tensors, named as in PEFT's configuration.

    Args:
        names: Names of the tensors.
        experts: See :func:`write_adapter`.
        vision: See :func:`write_adapter`.

    Returns:
        ``target_modules`` and ``target_parameters``.
    """
    modules, parameters = set(), set()
    for name in names:
        tensor = _TENSOR.fullmatch(name)
        assert tensor is not None, name
        module = tensor["module"]
        leaf = module.rpartition(".")[2]
        if experts and leaf in _RENAMED and not _OF_AN_EXPERT.search(module):
            parameters.add(f"{module}.weight")
        else:
            modules.add(module if vision else leaf)
    return sorted(modules), sorted(parameters)


def require_same_tensors(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that an adapter on disk fits the model, the targets and the LoRA rank of the run.

    Args:
        directory: Directory of the adapter.
        expected: Names and shapes of the tensors of the adapters in the model.

    Raises:
        EngineError: A tensor is missing, unknown, or of another shape, or the file cannot be read.
    """
    path = directory / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise exhausted(error, str(path)) or EngineError(
            "The adapter cannot be read.", where=str(path), why=str(error), fix="copy the directory again"
        ) from error
    if missing := sorted(expected.keys() - found.keys()):
        why = f"tensors are missing: {_shortened(missing)}"
        _refuse(path, why, "remove layers from model.lora.targets")
    if unknown := sorted(found.keys() - expected.keys()):
        why = f"the model and model.lora.targets do not have these tensors: {_shortened(unknown)}"
        _refuse(path, why, "add layers to model.lora.targets, or give an adapter of this model")
    for name, shape in expected.items():
        if found[name] != shape:
            why = f"{name} has the shape {found[name]}, but the model needs {shape}"
            _refuse(path, why, "give an adapter of this model")


def _shortened(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]


def _refuse(path: Path, why: str, fix: str) -> None:
    raise EngineError("The adapter does not match the model.", where=str(path), why=why, fix=fix)
