"""Code that runs in the workers of vLLM: a backend of its weight transfer, a plugin, and an extension of the worker.

vLLM loads plugins in every process that it starts (entry point ``vllm.general_plugins``). The backend is used through
vLLM's public calls alone: ``start_weight_update``, ``update_weights`` for each chunk, ``finish_weight_update``. The
weights have been verified before the first call (:mod:`anytron_vllm.weights`).

All other uses of vLLM's internals by this package are in this file: the layers' count of loaded weights, the kernels
that compute from copies, the model's logits and its adapters. Look here first to support another version.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.layerwise import logger as layerwise_logger

from anytron.base.errors import EngineError
from anytron.workers.weights.transfer import checksum

if TYPE_CHECKING:
    from torch import Tensor, nn


BACKEND = "anytron"


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Empty arguments for ``init_transfer_engine``: no connection has to be set up."""


@dataclass
class Chunk(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Whole tensors on the host, by their Hugging Face names."""

    weights: dict[str, Tensor] = field(default_factory=dict)


class AnytronTransfer(WeightTransferEngine[NoInit, Chunk]):  # type: ignore[misc]
    """Loads weights into one vLLM worker."""

    init_info_cls = NoInit
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Make every layer wait for all of its weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a chunk. vLLM's own method synchronizes the accelerator, which fails without one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Chunk) -> None:
        """Pass a chunk to the model, which loads the part that belongs to this worker."""
        self.model.load_weights(update_info.weights.items())

    def finish_weight_update(self) -> None:
        """Check that the model has taken everything, and prepare its kernels.

        Raises:
            EngineError: Some weights are missing; the model must not be used any more.
        """
        if incomplete := _incomplete_layers(self.model):
            raise EngineError(
                "vLLM did not load all weights of the model.",
                where=incomplete[0],
                why=f"{len(incomplete)} layers received only some of their weights, or none",
                fix="train this model with rollout.engine=transformers",
            )
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


def _incomplete_layers(model: nn.Module) -> list[str]:
    """Find layers with parameters that vLLM still expects, after all weights were given to the model.

    A layer that has received all its parameters is processed at once and expects no more. Padding rows of embeddings
    are never received; some workers have only padding. A tied layer's parameters are loaded by an earlier layer.
    """
    found = []
    before: set[int] = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        expects = info.can_load() and not is_deferred_attention_layer(layer)
        parameters = info.kernel_tensors[0].values() if info.can_load() else layer.parameters(recurse=False)
        own = {id(parameter) for parameter in parameters} - before
        before |= own
        wanted = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if isinstance(layer, VocabParallelEmbedding):
            wanted = layer.shard_indices.num_org_elements * layer.embedding_dim
        if expects and own and info.load_numel < wanted:
            found.append(name)
    return found


def _repack(model: nn.Module) -> None:
    """Load the new weights into kernels for the CPU that would silently keep the old ones in vLLM 0.32.

    These kernels compute from copies of the weights in another layout. vLLM copies experts at the first load only
    (UnquantizedFusedMoEMethod._setup_kernel), and does not copy a tied head again, because another layer loads the tied
    tensor.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes, and may do so more than once."""
    # It warns at every update of layers that got nothing: rotary tables, which are not sent, and tied heads.
    layerwise_logger.setLevel(logging.ERROR)
    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine(BACKEND, AnytronTransfer)


class WorkerExtension:
    """Methods that the engine calls on every worker (vLLM's argument ``worker_extension_cls``)."""

    def set_anytron_temperature(self, temperature: float) -> None:
        """Divide all logits by a temperature, in float32 as the training engine does.

        vLLM reports log-probs of the model's logits (``raw_logprobs``), or of the logits after temperature, top-k,
        top-p and the suppression of end tokens (``processed_logprobs``). A training engine computes something in
        between: at the temperature, before any filter. So logits are divided before vLLM sees them, and vLLM samples at
        temperature 1. (verl replaces the same method to mask tokens outside of the vocabulary.)
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]  # the worker's own
        if not hasattr(model, "anytron_logits"):
            model.anytron_logits = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
            logits: Tensor | None = model.anytron_logits(*args, **kwargs)
            return logits if logits is None or temperature == 1.0 else logits.float() / temperature

        model.compute_logits = compute_logits

    def anytron_adapter_checksums(self, number: int) -> list[int]:
        """Return the sorted checksums of the tensors that vLLM has loaded for the adapter with this number.

        vLLM packs the tensors of layers that it joins, without changing them. It also keeps tensors of layers that the
        model does not have, and ignores them.
        """
        manager = self.model_runner.get_model().lora_manager  # type: ignore[attr-defined]
        adapter = manager.get_adapter(number)
        if adapter is None or number not in manager.lora_index_to_id:
            return []
        found: list[int] = []
        for name in adapter.loras.keys() & manager.modules.keys():
            for factor in (adapter.loras[name].lora_a, adapter.loras[name].lora_b):
                parts = factor if isinstance(factor, list) else [factor]
                found += [checksum(part) for part in parts if part is not None]
        return sorted(found)

    def unlink_anytron_shared_memory(self) -> None:
        """Unlink the shared memory through which workers on the CPU exchange tensors.

        All workers have it open by now. vLLM 0.32 leaves it behind when it ends, 4 MB each.
        """
        if name := os.environ.get("VLLM_DIST_IDENT"):
            for path in Path("/dev/shm").glob(f"{name}-*"):  # noqa: S108 - where Linux has it
                path.unlink(missing_ok=True)
