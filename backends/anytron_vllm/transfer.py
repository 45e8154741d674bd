"""Code that runs in the workers of vLLM: an extension of the worker, whose methods the engine calls.

vLLM calls a worker's methods by name (``collective_rpc``), in each version and on each platform. Its own classes of
weight transfer differ between versions, and vllm-ascend replaces the worker's methods that use them. The weights have
been verified before the first call (:mod:`anytron_vllm.weights`).

The other uses of vLLM's internals are in this file: the layers' count of loaded weights, the kernels
that compute from copies, the model's logits and its adapters. What differs between versions is in
:mod:`anytron_vllm.release`.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.layerwise import logger as layerwise_logger

from anytron.base.errors import EngineError
from anytron.workers.weights.transfer import checksum
from anytron_vllm.kept import check_latent_attention, check_places, places_of
from anytron_vllm.release import is_deferred_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from anytron_vllm.kept import Place


def _incomplete_layers(model: nn.Module) -> list[str]:
    """Find layers with parameters that vLLM still expects, after all weights were given to the model.

    A layer that has received all its parameters is processed at once and expects no more. Padding rows of embeddings
    are never received; some workers have only padding. A tied layer's parameters are loaded by an earlier layer.
    """
    found = []
    before: set[int] = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        expects = info.can_load() and not is_deferred_attention(layer)
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
    """Load the new weights into kernels for the CPU that would silently keep the old ones, from vLLM 0.28 on.

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


class WorkerExtension:
    """Methods that the engine calls on every worker (vLLM's argument ``worker_extension_cls``)."""

    _anytron_places: dict[str, Place] | None = None
    """Where the parameters lay after the last update; None before the first one."""

    def start_anytron_update(self) -> None:
        """Make every layer wait for all of its weights.

        Raises:
            EngineError: Layers no longer keep their weights as they did after the last update.
        """
        # vLLM warns at every update of layers that got nothing: rotary tables, which are not sent, and tied heads.
        layerwise_logger.setLevel(logging.ERROR)
        with self._anytron_loading() as model:
            if self._anytron_places is None:
                self._anytron_places = places_of(model)
            check_places(model, self._anytron_places)
            initialize_layerwise_reload(model)

    def load_anytron_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Pass whole tensors to the model, which loads the part that belongs to this worker.

        Args:
            weights: Tensors on the host, by their Hugging Face names.
        """
        with self._anytron_loading() as model:
            model.load_weights(weights.items())

    def finish_anytron_update(self) -> None:
        """Check that the model has taken everything, and prepare its kernels.

        Raises:
            EngineError: Some weights are missing, or layers keep them otherwise than before: the model must not be used
                any more.
        """
        with self._anytron_loading() as model:
            if incomplete := _incomplete_layers(model):
                raise EngineError(
                    "vLLM did not load all weights of the model.",
                    where=incomplete[0],
                    why=f"{len(incomplete)} layers received only some of their weights, or none",
                    fix="train this model with rollout.engine=transformers",
                )
            finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
            check_places(model, self._anytron_places or {})
            check_latent_attention(model)
            device = torch.device(self.device)  # type: ignore[attr-defined]
            if device.type == "cpu":
                _repack(model)
            else:
                torch.accelerator.synchronize(device)
            self._anytron_places = places_of(model)

    @contextmanager
    def _anytron_loading(self) -> Iterator[Any]:
        """Yield the model, in the context in which vLLM loads weights."""
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):  # type: ignore[attr-defined]
            yield self.model_runner.get_model()  # type: ignore[attr-defined]

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

    def anytron_free_bytes(self) -> int:
        """Return the free memory of this worker's device."""
        device = torch.device(self.device)  # type: ignore[attr-defined]
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free)

    def unlink_anytron_shared_memory(self) -> None:
        """Unlink the shared memory through which workers on the CPU exchange tensors.

        All workers have it open by now. vLLM leaves it behind when it ends, 4 MB each.
        """
        if name := os.environ.get("VLLM_DIST_IDENT"):
            for path in Path("/dev/shm").glob(f"{name}-*"):  # noqa: S108 - where Linux has it
                path.unlink(missing_ok=True)
