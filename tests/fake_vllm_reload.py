"""A stand-in for vLLM's layerwise reloading, for machines without vLLM: what ``anytron_vllm.transfer`` imports.

As vLLM's: layers wait on the meta device for all of their weights, are processed once, and the result is copied into
the tensors that they kept. With vLLM the same tests use vLLM's own (``tests/transposing_model.py``).
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

import anytron_vllm


class QuantizeMethodBase:
    """Processes a layer's weights after loading."""


class Attention(nn.Module):
    """Is processed after all other layers."""


class MLAAttention(Attention):
    """Latent attention."""


class VocabParallelEmbedding(nn.Module):
    """Not used here."""


class ParallelLMHead(VocabParallelEmbedding):
    """Not used here."""


class Waiting:
    """A layer's tensors that wait for new values.

    Attributes:
        made: Parameters as the layer was built with them, on the meta device.
        kernel_tensors: Parameters and buffers that the layer computes with, during an update.
        loaded: Calls of weight loaders, to be made when all weights have come.
        load_numel: Numbers that have come.
    """

    def __init__(self, made=None):
        self.made, self.kernel_tensors, self.loaded, self.load_numel = made or {}, None, [], 0

    def can_load(self):
        return self.kernel_tensors is not None


_WAITING: dict[nn.Module, Waiting] = {}


def get_layerwise_info(layer):
    return _WAITING.setdefault(layer, Waiting())


def _parameters(layer):
    return {name: one for name, one in layer._parameters.items() if one is not None}


def _copy(parameter, device):
    made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)
    made.weight_loader = parameter.weight_loader
    return made


def _put(layer, parameters):
    for name in _parameters(layer):
        delattr(layer, name)
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)


def record_metadata_for_reloading(model):
    for layer in model.modules():
        _WAITING[layer] = Waiting({name: _copy(one, "meta") for name, one in _parameters(layer).items()})


def initialize_layerwise_reload(model):
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.kernel_tensors = _parameters(layer), {}
        _put(layer, {name: _copy(one, "meta") for name, one in info.made.items()})
        for name, parameter in _parameters(layer).items():
            parameter.weight_loader = _waiting_loader(layer, name)


def _waiting_loader(layer, name):
    def load(parameter, loaded, *arguments):
        info = get_layerwise_info(layer)
        info.loaded.append((name, loaded, arguments))
        info.load_numel += loaded.numel()
        if info.load_numel >= sum(one.numel() for one in _parameters(layer).values()):
            _process(layer, info)

    return load


def _process(layer, info):
    _put(layer, {name: _copy(one, torch.get_default_device()) for name, one in info.made.items()})
    for name, loaded, arguments in info.loaded:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, loaded, *arguments)
    if isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
        layer.quant_method.process_weights_after_loading(layer)
    for name, kept in info.kernel_tensors[0].items():
        kept.data.copy_(getattr(layer, name))
    _end(layer, info)


def _end(layer, info):
    _put(layer, info.kernel_tensors[0])
    _WAITING[layer] = Waiting(info.made)


def finalize_layerwise_reload(model, config):
    for layer in model.modules():
        if (info := get_layerwise_info(layer)).can_load():
            _end(layer, info)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.process_weights_after_loading(config.dtype)


@contextmanager
def set_current_vllm_config(config):
    del config
    yield


MODULES = {
    "vllm": {},
    "vllm.config": {"set_current_vllm_config": set_current_vllm_config},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"Attention": Attention, "MLAAttention": MLAAttention},
    "vllm.model_executor.layers.quantization": {},
    "vllm.model_executor.layers.quantization.base_config": {"QuantizeMethodBase": QuantizeMethodBase},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "ParallelLMHead": ParallelLMHead,
        "VocabParallelEmbedding": VocabParallelEmbedding,
    },
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {
        "finalize_layerwise_reload": finalize_layerwise_reload,
        "initialize_layerwise_reload": initialize_layerwise_reload,
        "record_metadata_for_reloading": record_metadata_for_reloading,
    },
    "vllm.model_executor.model_loader.reload.layerwise": {
        "get_layerwise_info": get_layerwise_info,
        "logger": logging.getLogger("stand-in"),
    },
}


@contextmanager
def stand_in(monkeypatch):
    """Put the modules where ``anytron_vllm.transfer`` imports vLLM's from, and import that module anew."""
    for name, values in MODULES.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    _forget()
    yield
    _forget()


def _forget():
    sys.modules.pop("anytron_vllm.transfer", None)
    vars(anytron_vllm).pop("transfer", None)
