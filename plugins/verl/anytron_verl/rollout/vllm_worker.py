"""verl's extension of vLLM's workers, for CPUs (``engine_kwargs.vllm.worker_extension_cls``).

When vLLM starts, it packs linear layers for CPU kernels and empties their parameters, but verl loads weights into the
parameters. Here vLLM restores the parameters for each update, with its own calls for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

if TYPE_CHECKING:
    from torch import Tensor


class WorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """verl's extension, for vLLM with ``weight_transfer_config={backend: anytron}``."""

    def update_weights_from_ipc(self, *arguments: Any, **named: Any) -> None:
        """Update all weights with verl's protocol.

        Raises:
            EngineError: A part of the model received no weights; the model must not be used any more.
        """
        self.start_weight_update()
        super().update_weights_from_ipc(*arguments, **named)
        self.finish_weight_update()

    def _update_weights(self, weights: list[tuple[str, Tensor]], *arguments: Any, **named: Any) -> None:
        """Load a copy of a bucket: layers wait for all their weights, and the next bucket reuses the memory."""
        super()._update_weights([(name, tensor.clone()) for name, tensor in weights], *arguments, **named)
