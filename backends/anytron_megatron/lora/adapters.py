"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on this rank's part of a model.

``y = W x + scaling * B A x``: ``A`` and ``B`` are trained, ``W`` never changes. mcore-bridge's layers
compute it (``mcore_bridge/tuners/lora.py``); they exist for every way in which Megatron splits a layer.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEGroupedLinear, TELayerNormColumnParallelLinear, TELinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from anytron.base.errors import ConfigError, did_you_mean
from anytron.base.seeds import derive_seed
from anytron_megatron.lora.names import ALL_LINEAR, matches
from anytron_megatron.lora.peft_directory import require_same_tensors, write_adapter
from anytron_megatron.models.source import text_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mcore_bridge.tuners import LoraParallelLinear

    from anytron.config.schema import LoraSection
    from anytron_megatron.models.source import AdapterSource

ADAPTER = "default"
"""PEFT's name of the one adapter that each layer has."""

_LINEAR = (TELinear, TELayerNormColumnParallelLinear, TEGroupedLinear, ColumnParallelLinear, RowParallelLinear)
_IN_A_LAYER = re.compile(r"(?:language_model\.)?decoder\.layers\.\d+\.(?P<path>.+)")
"""Where adapters go: neither vision towers nor multi-token prediction, which Hugging Face does not load."""


def find_targets(chunks: Sequence[nn.Module], targets: Sequence[str]) -> list[list[str]]:
    """Return the names of the modules that get an adapter. A collective: pipeline stages have different layers.

    Args:
        chunks: The model on this rank, without adapters.
        targets: ``model.lora.targets``: the last part, or the last parts, of a layer's name.

    Returns:
        Full names of modules, for each chunk.

    Raises:
        ConfigError: A target matches nothing on any rank.
    """
    found = [_linear_layers(chunk) for chunk in chunks]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, [path for layers in found for path in layers.values()])
    present = {path for paths in gathered for path in paths}
    names = [path.rpartition(".")[2] for path in present]
    for target in targets:
        if not any(matches(path, target) for path in present):
            raise ConfigError(
                f"No layer of this model is called {target!r}.",
                where="model.lora.targets",
                why=f"its layers are {', '.join(sorted(present))}",
                fix=did_you_mean(target, names)
                or f"set model.lora.targets to names of some of these layers, or to [{ALL_LINEAR}]",
            )
    return [
        [name for name, path in layers.items() if any(matches(path, target) for target in targets)] for layers in found
    ]


def _linear_layers(chunk: nn.Module) -> dict[str, str]:
    """Map each linear layer's full name to its name within its transformer layer.

    Routers are not linear layers to Megatron. The indexer of sparse attention only chooses positions: no
    gradient of the loss reaches it.
    """
    layers = {}
    for name, module in chunk.named_modules():
        place = _IN_A_LAYER.fullmatch(name)
        if place is not None and isinstance(module, _LINEAR) and "indexer" not in place["path"].split("."):
            layers[name] = place["path"]
    return layers


class Adapters:
    """Attach adapters to a model, and freeze all its other parameters.

    Initially they change nothing: ``B`` is zero, and ``A`` depends on the seed and the layer's name alone, so that the
    initial adapters are the same in every parallel layout (mcore-bridge's own initialisation depends on the layout).

    Args:
        source: The model directory that the chunks were built from.
        chunks: The model on this rank, with its weights; changed in place.
        section: ``model.lora``; with ``path``, the adapters start from those on disk.
        seed: ``trainer.seed``.

    Attributes:
        chunks: The model.
        layers: Layers with adapters, by names that do not depend on how the model is split into stages.

    Raises:
        ConfigError: See :func:`find_targets`.
        EngineError: The adapters on disk do not match the model.
    """

    def __init__(self, source: AdapterSource, chunks: Sequence[nn.Module], section: LoraSection, seed: int) -> None:
        self._source = source
        self.chunks = list(chunks)
        self._section = section

        for chunk, names in zip(chunks, find_targets(chunks, section.targets), strict=True):
            chunk.requires_grad_(False)
            for name in names:
                _attach(chunk, name, section)
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                # An expert bias moves with the router's use, without gradients; mcore-bridge's routers ask for this.
                router.frozen_expert_bias = True
        self.layers = {name: layer for chunk in chunks for name, layer in _adapted(chunk)}
        for name, layer in self.layers.items():
            _initialise(name, layer, seed)
        if section.path is not None:
            self._load(Path(section.path))
        self._initial = {
            factor: factor.detach().clone()
            for layer in self.layers.values()
            for _, *factors in factors_of(layer)
            for factor in factors
        }

    def reference_weights(self) -> contextlib.AbstractContextManager[None]:
        """Give the adapters their initial values in the ``with`` block: the reference model of a KL penalty."""
        return _substituted(self._initial)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Replace the model's own weights by ``W + scaling * B A``, computed in float32 and rounded once.

        The weights themselves are not overwritten: in the ``with`` block, their parameters hold other tensors, which
        take as much memory as the layers with adapters.
        """
        with torch.no_grad():
            merged = {
                weight: (weight.float() + layer.scaling[ADAPTER] * (b.float() @ a.float())).to(weight.dtype)
                for layer in self.layers.values()
                for weight, a, b in factors_of(layer)
            }
        with _substituted(merged):
            yield

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters under PEFT's names, on the host, on rank 0. A collective: every rank must exhaust it."""
        return self._source.export_adapters(self.chunks)

    def save(self, directory: Path) -> None:
        """Write the adapters in PEFT's format. A collective."""
        tensors = dict(self.export())
        if dist.get_rank() == 0:
            write_adapter(
                directory,
                tensors,
                self._section,
                base=self._source.model_dir,
                experts=self._source.traits.mixture_of_experts,
                vision=self._source.traits.vision,
            )

    def _load(self, directory: Path) -> None:
        expected = [{name: tuple(tensor.shape) for name, tensor in self._source.export_adapters(self.chunks)}]
        dist.broadcast_object_list(expected)
        require_same_tensors(directory, expected[0])
        self._source.load_adapters(self.chunks, directory)


def _attach(chunk: nn.Module, name: str, section: LoraSection) -> None:
    """Replace a linear layer by one with an adapter, which holds it.

    ``peft.inject_adapter_in_model`` would not do: since 0.19 PEFT passes its settings as one object, which
    mcore-bridge 1.6.5 ignores, so that dropout, rsLoRA and the kind of initialisation are lost silently
    (``mcore_bridge/tuners/lora.py``, ``LoraParallelLinear.__init__``, ``**kwargs``).
    """
    from mcore_bridge.model.modules.gated_delta_net import GatedDeltaNet
    from mcore_bridge.tuners import LoraParallelLinear

    parent, _, leaf = name.rpartition(".")
    owner = chunk.get_submodule(parent)
    layer = LoraParallelLinear(
        chunk.get_submodule(name),
        ADAPTER,
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.rank_stabilized,
        init_lora_weights=False,
    )
    if isinstance(owner, GatedDeltaNet):
        # It gathers whole sequences before its linear layers, so that gradients of factors that all ranks hold are
        # complete. mcore-bridge marks them as partial, and Megatron would sum them over tensor-parallel ranks.
        for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            parameter.sequence_parallel = False
    setattr(owner, leaf, layer)


def _adapted(chunk: nn.Module) -> Iterator[tuple[str, LoraParallelLinear]]:
    """Yield the layers with adapters, under names that do not depend on how the model is split into stages."""
    from mcore_bridge.tuners import LoraParallelLinear

    decoder: Any = text_model(chunk).decoder
    for transformer_layer in decoder.layers:
        for name, module in transformer_layer.named_modules():
            if isinstance(module, LoraParallelLinear):
                yield f"{transformer_layer.layer_number - 1}.{name}", module


def factors_of(layer: LoraParallelLinear) -> Iterator[tuple[nn.Parameter, nn.Parameter, nn.Parameter]]:
    """Yield ``W`` ``[out, in]``, ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` of a layer or of each expert in it."""
    parts = (layer.get_base_layer(), layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
    if not layer.is_grouped:
        yield tuple(part.weight for part in parts)
        return
    for index in range(parts[0].num_gemms):
        yield tuple(getattr(part, f"weight{index}") for part in parts)


@torch.no_grad()
def _initialise(name: str, layer: LoraParallelLinear, seed: int) -> None:
    """Start a layer's adapters as PEFT does: ``A`` uniform within ``1 / sqrt(in)``, ``B`` zero."""
    shards = layer.tp_size if layer.is_parallel_a else 1
    shard = parallel_state.get_tensor_model_parallel_rank() if shards > 1 else 0
    first = parallel_state.get_expert_model_parallel_rank() * layer.base_layer.num_gemms if layer.is_grouped else 0
    for index, (_, a, b) in enumerate(factors_of(layer), start=first):
        generator = torch.Generator().manual_seed(derive_seed(seed, f"lora {name}", index))
        whole = torch.empty(a.shape[0], a.shape[1] * shards)
        bound = 1.0 / math.sqrt(whole.shape[1])
        whole.uniform_(-bound, bound, generator=generator)
        a.copy_(whole.chunk(shards, dim=1)[shard])
        b.zero_()


@contextlib.contextmanager
def _substituted(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let parameters hold other tensors; their own come back bit for bit."""
    own = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, value in own.items():
            parameter.data = value
