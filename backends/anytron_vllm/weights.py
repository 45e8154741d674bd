"""Weights and adapters on their way to vLLM: all of them are received and checked before any is used.

vLLM accepts a part of a model's weights without an error. The expected names and shapes come from the model's class in
transformers, instantiated on the meta device. The adapter of ``rollout.lora: alone`` is passed in files, from which
vLLM reads adapters.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from anytron.base.files import PrivateDirectory
from anytron.task.data.pretrained import load_hf_config, logits_config, model_class
from anytron.workers.weights.transfer import checksum
from anytron_rollout.weights import Places, refuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor

    from anytron.config.schema import LoraSection, ModelSection
    from anytron.workers.weights.transfer import ReceivedWeights


CHUNK_BYTES = 256 << 20
"""Bytes of weights that a worker of vLLM in another process gets at a time."""

ADAPTER_ID = 1
"""vLLM's number of the adapter. All versions have the same, so that responses in progress go on with the new one."""

PREFIX = "anytron-adapter-"


def put_together(received: ReceivedWeights) -> tuple[dict[str, Tensor], set[str]]:
    """Assemble verified pieces into tensors in this process's memory.

    Returns:
        The tensors by name, and the names of optional tensors, which the model need not have.

    Raises:
        TransferError: The pieces did not arrive as they were sent.
    """
    tensors: dict[str, Tensor] = {}
    optional = set()
    for piece in received:
        if piece.name not in tensors:
            tensors[piece.name] = torch.empty(math.prod(piece.shape), dtype=piece.values.dtype).view(piece.shape)
            if piece.optional:
                optional.add(piece.name)
        tensors[piece.name].view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
    return tensors, optional


def receive_all(received: ReceivedWeights, expected: ExpectedWeights) -> dict[str, Tensor]:
    """Receive all weights of a model.

    vLLM loads in place and cannot undo this. So that the old weights stay in use until all new weights have arrived,
    the new weights are kept in host memory, as large as the model.

    Args:
        received: The pieces as they arrive; each is verified.
        expected: The weights that the model needs.

    Returns:
        The tensors by their Hugging Face names, without optional tensors that the model does not have.

    Raises:
        EngineError: A tensor is missing, unknown, or has the wrong shape.
        TransferError: The weights did not arrive as they were sent.
    """
    weights, optional = put_together(received)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    loaded = expected.check(shapes, optional, received.version)
    return {name: weights[name] for name in sorted(loaded)}


def chunks(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split weights into parts of about :data:`CHUNK_BYTES`; a larger tensor is one part."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if chunk and size + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor
        size += tensor.nbytes
    yield chunk


class ExpectedWeights:
    """Names and shapes of a model's weights, as its published checkpoints have them.

    Args:
        model: Section ``model`` of the configuration.
    """

    def __init__(self, model: ModelSection) -> None:
        config = logits_config(load_hf_config(model))
        with torch.device("meta"):
            self._places = Places(model_class(config).from_config(config))

    @property
    def modules(self) -> Collection[str]:
        """Names of the model's tensors in transformers, which may differ from the published ones."""
        return self._places.modules

    def check(self, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str], version: int) -> set[str]:
        """Compare received tensors with the model's.

        Args:
            shapes: The tensors' shapes by name.
            optional: Names of tensors that are ignored if the model has no tensor of that name.
            version: Version of the weights, for the error.

        Returns:
            The names to load.

        Raises:
            EngineError: A tensor is missing, unknown, or has the wrong shape.
        """
        places = {name: place for name in shapes if (place := self._places.find(name)) is not None}
        loaded = shapes.keys() - (set(optional) - places.keys())
        if unknown := sorted(loaded - places.keys()):
            why = f"{len(unknown)} of {len(shapes)} weights are unknown"
            refuse("is unknown to the model", unknown[0], why, version)
        for name in sorted(loaded):
            if tuple(places[name].tensor.shape) != shapes[name]:
                why = f"its shape is {shapes[name]}, and the model has {tuple(places[name].tensor.shape)}"
                refuse("has the wrong shape", name, why, version)
        if missing := self._places.missing(places[name] for name in loaded):
            refuse("is missing", missing[0], f"{len(missing)} of the model's weights are missing", version)
        return loaded


class AdapterDirectory:
    """A directory that only this user can read, with the adapter's last version in PEFT's format.

    If an engine is killed, its directory stays; the next engine that makes such a directory deletes it.

    Args:
        section: ``model.lora``.
        dtype: The dtype in which vLLM computes.

    Attributes:
        path: Path of the directory.
    """

    def __init__(self, section: LoraSection, dtype: torch.dtype) -> None:
        self._section, self._dtype = section, dtype
        self._directory = PrivateDirectory(PREFIX)
        self.path = self._directory.path
        # The factor of the adapter's output is multiplied into B, so that vLLM holds the tensors that are written.
        fields = {"peft_type": "LORA", "r": section.rank, "lora_alpha": section.rank, "target_modules": []}
        (self.path / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")

    def write(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Write ``lora_A`` and ``lora_B``, by PEFT's names, over the previous version.

        Returns:
            The checksums of the tensors that were written, sorted.
        """
        written = {
            name: (tensor.float() * (self._section.scaling if ".lora_B." in name else 1.0)).to(self._dtype)
            for name, tensor in tensors.items()
        }
        save_file(written, self.path / "adapter_model.safetensors")
        return sorted(map(checksum, written.values()))

    def delete(self) -> None:
        """Delete the directory."""
        self._directory.delete()
