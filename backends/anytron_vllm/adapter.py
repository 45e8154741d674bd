"""The adapter of ``rollout.lora: alone``: in files, because vLLM reads adapters from there. Imports no vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.base.temporary import PrivateDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from anytron.config.schema import LoraSection

ADAPTER_ID = 1
"""vLLM's number of the adapter. It is the same for every version: responses under way go on with the new one."""
PREFIX = "anytron-adapter-"
LARGEST_RANK = 512
BUFFER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
"""Ranks that vLLM's buffers may have room for (vllm/config/lora.py, ``MaxLoRARanks``, 0.32)."""


def adapter_arguments(section: LoraSection) -> dict[str, Any]:
    """The arguments of ``vllm.EngineArgs`` for one adapter."""
    room = min(rank for rank in BUFFER_RANKS if rank >= section.rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


class AdapterDirectory:
    """A directory of this user alone that holds the adapter's last version, in PEFT's format.

    That of an engine that was killed is deleted by the next one's, which takes its place or is of another run.

    Args:
        section: ``model.lora``.
        dtype: In which vLLM computes.

    Attributes:
        path: Of the directory.
    """

    def __init__(self, section: LoraSection, dtype: torch.dtype) -> None:
        self._section, self._dtype = section, dtype
        self._directory = PrivateDirectory(PREFIX)
        self.path = self._directory.path
        # The factor of the adapter's output is multiplied into B, so that vLLM holds the tensors that are written.
        fields = {"peft_type": "LORA", "r": section.rank, "lora_alpha": section.rank, "target_modules": []}
        (self.path / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")

    def write(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Write ``lora_A`` and ``lora_B``, by PEFT's names, over those of the version before.

        Returns:
            The checksums of the tensors that were written, sorted.
        """
        from safetensors.torch import save_file

        from anytron.workers.weights.transfer import checksum

        written = {
            name: (tensor.float() * (self._section.scaling if ".lora_B." in name else 1.0)).to(self._dtype)
            for name, tensor in tensors.items()
        }
        save_file(written, self.path / "adapter_model.safetensors")
        return sorted(map(checksum, written.values()))

    def delete(self) -> None:
        """Delete the directory."""
        self._directory.delete()
