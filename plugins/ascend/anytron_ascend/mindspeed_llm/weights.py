"""Weights of MindSpeed-LLM's models from and to Hugging Face directories, over mbridge."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from anytron import EngineError
from anytron.engines import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor, nn

_LOADING_FAILS = (KeyError, AssertionError, RuntimeError, ValueError, OSError, SafetensorError)
"""What mbridge raises, from various places, when a tensor is missing or has another shape."""

VALUE_HEAD = "value_head."
"""Beginning of the names of a critic's head (:class:`anytron_megatron.critic.ValueHead`)."""
_ONE_BY_ONE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class HuggingFaceWeights:
    """The weights of one model directory.

    Args:
        directory: With ``config.json`` and safetensors.
        dtype: Element type of the parameters.
        padded_vocab_size: Rows of embedding and output layer, over all tensor-parallel ranks.

    Raises:
        EngineError: mbridge does not know the model type.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, padded_vocab_size: int) -> None:
        from mbridge import AutoBridge

        self.hf_config = read_hf_config(directory)
        self._directory = directory
        try:
            self._bridge: Any = AutoBridge.from_config(self.hf_config, dtype=dtype, make_vocab_size_divisible_by=1)
        except (KeyError, ValueError, NotImplementedError) as error:
            raise EngineError(
                "The weights of this model family cannot be read.",
                where=str(directory / "config.json"),
                why=f"mbridge does not know model_type '{self.hf_config.model_type}': {error}",
                fix="use a model of a family that mbridge has, for example qwen3",
            ) from error
        # For a model with tied embeddings mbridge changes the table of its class, for every model to come
        # (mbridge/models/qwen2.py, _adjust_mapping_for_shared_weights).
        head = "model.embed_tokens.weight" if self.hf_config.tie_word_embeddings else "lm_head.weight"
        self._bridge._DIRECT_MAPPING = {**self._bridge._DIRECT_MAPPING, "output_layer.weight": head}
        self._bridge.vocab_size = self.hf_config.vocab_size
        self._bridge.padded_vocab_size = padded_vocab_size

    @torch.no_grad()
    def load(self, chunks: Sequence[nn.Module]) -> None:
        """Read the directory into the models. A collective.

        Every parameter is NaN before, so that one that was not read is found.

        Raises:
            EngineError: On all ranks, if a tensor is missing or has another shape anywhere, or a file is damaged.
        """
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
        failure = ""
        try:
            self._bridge.load_weights([_Named(chunk) for chunk in chunks], str(self._directory))
        except _LOADING_FAILS as error:
            failure = f"{type(error).__name__}: {error}"
        unfilled = [name for chunk in chunks for name, value in chunk.named_parameters() if value.isnan().any()]
        if not failure and unfilled:
            failure = f"{len(unfilled)} of the model's parameters got no finite values, {min(unfilled)} for one"
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        if any(failures):
            raise EngineError(
                "The weights do not fit the model.",
                where=str(self._directory),
                why=next(filter(None, failures)),
                fix="use the weights that belong to this config.json, or complete the download",
            )

    @torch.no_grad()
    def export(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, whole, on the device, on every rank. A collective."""
        yield from self._bridge.export_weights([_Named(chunk) for chunk in chunks])


class _Named:
    """A model, its parameters named as mbridge names them.

    Experts that are computed one by one are numbered like those of one grouped matrix product, and a critic's
    head is no part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if hasattr(model, "decoder"):
            self.decoder = model.decoder

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = ((_numbered(name), parameter) for name, parameter in self._model.named_parameters())
        return ((name, parameter) for name, parameter in named if not name.startswith(VALUE_HEAD))

    def state_dict(self) -> dict[str, Any]:
        named = ((_numbered(name), value) for name, value in self._model.state_dict().items())
        return {name: value for name, value in named if not name.startswith(VALUE_HEAD)}


def _numbered(name: str) -> str:
    return _ONE_BY_ONE.sub(r".experts.\2.weight\1", name)
