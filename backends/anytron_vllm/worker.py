"""What each worker of vLLM gets besides its own methods (its argument ``worker_extension_cls``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.workers.weights.transfer import checksum

if TYPE_CHECKING:
    from torch import Tensor


class WorkerExtension:
    """Methods that the engine calls on every worker."""

    def set_anytron_temperature(self, temperature: float) -> None:
        """Divide all logits by a temperature, in float32 as the training engine does.

        vLLM reports log-probs of the logits as the model gives them (``raw_logprobs``), or of what is left of them
        after temperature, top-k, top-p and the suppression of end tokens (``processed_logprobs``). A training engine
        computes something in between: at the temperature, before any filter. So logits are divided before vLLM sees
        them, and vLLM samples at temperature 1. (verl replaces the same method to mask tokens outside of the
        vocabulary.)
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]  # the worker's own
        if not hasattr(model, "anytron_logits"):
            model.anytron_logits = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
            logits: Tensor | None = model.anytron_logits(*args, **kwargs)
            return logits if logits is None or temperature == 1.0 else logits.float() / temperature

        model.compute_logits = compute_logits

    def anytron_adapter_checksums(self, number: int) -> list[int]:
        """Compute the checksums of the tensors of the adapter that vLLM computes with by a number, sorted.

        It packs those of layers that it keeps in one, and does not change them. Those of layers that the model does not
        have it keeps too, and does nothing with them.
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
        """Take away the names of the memory through which workers on the processor exchange tensors.

        All of them have it by now. vLLM 0.32 leaves the names behind when it ends, 4 MB each.
        """
        if name := os.environ.get("VLLM_DIST_IDENT"):
            for path in Path("/dev/shm").glob(f"{name}-*"):  # noqa: S108 - where Linux has it
                path.unlink(missing_ok=True)
