"""The platform's masks for ms-swift's padded rows.

ms-swift prepares a micro-batch in one function, and calls models in many. The patched function stores the micro-batch
for the next call of any model in this process, a policy or its reference.

Packed sequences are left to ms-swift. Their kernels need no mask, and Anytron has no layout for ms-swift's buffer,
which context parallelism fills up with dummy sequences.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron import ParallelSizes
from anytron.sequences import LayoutConstraints, RaggedBatch, scopes
from anytron_megatron import accepted_masks, batch_preparer, features_of, traits_of
from anytron_swift.process import stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer import TransformerConfig

    from anytron_megatron import BatchPreparer, PreparedBatch

_rows: tuple[RaggedBatch, int] | None = None


def prepare_batch(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ms-swift's ``prepare_batch``: for padded rows, make no mask, and store the sequences for :func:`forward`."""

    @functools.wraps(original)
    def prepare(args: Any, data: dict[str, Any], vp_stage: int | None = None) -> dict[str, Any]:
        global _rows  # noqa: PLW0603 - of the process, as the model's forward pass is
        _rows = _padded_rows(args, data)
        batch = original(args, data, vp_stage=vp_stage)
        if _rows is not None:
            batch["attention_mask"] = None
        return batch

    return prepare


def _padded_rows(args: Any, data: dict[str, Any]) -> tuple[RaggedBatch, int] | None:
    """Return the sequences of ms-swift's rows, and the length of the rows before they are sharded for this rank.

    None where ms-swift's own mask stays: for packed sequences, for rows that are padded on the left, which no layout of
    Anytron describes, and for losses that find the last tokens by the mask.
    """
    lengths, tokens = data.get("seq_lens"), data.get("input_ids")
    if (
        args.padding_free
        or args.task_type != "causal_lm"
        or args.padding_side != "right"
        or lengths is None
        or tokens is None
    ):
        return None
    flat = torch.cat([row[:length] for row, length in zip(tokens, lengths, strict=True)]).cpu()
    return RaggedBatch(torch.tensor(lengths), flat, torch.ones_like(flat, dtype=torch.bool)), tokens.shape[1]


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's forward pass: use the platform's mask for the stored micro-batch, and enter its scope."""

    @functools.wraps(original)
    def run(
        self: Any,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if _rows is None:
            return original(self, input_ids, position_ids, attention_mask, *args, **kwargs)
        prepared = _prepared(self.config, *_rows)
        with scopes.enter(prepared.scope()):
            return original(self, input_ids, position_ids, prepared.attention_mask, *args, **kwargs)

    return run


def _prepared(config: TransformerConfig, batch: RaggedBatch, columns: int) -> PreparedBatch:
    return _preparer(_Hashed(config), columns).prepare(batch)


class _Hashed:
    """A configuration that is hashed by its identity, because Megatron's configurations have no hash."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.config is self.config

    def __hash__(self) -> int:
        return id(self.config)


@functools.lru_cache(maxsize=64)
def _preparer(hashed: _Hashed, columns: int) -> BatchPreparer:
    """Make the preparer that lays out a model's micro-batches in rows of ``columns`` tokens, as ms-swift does."""
    config = hashed.config
    portable = stack().platform.portable_modules
    return batch_preparer(
        stack(),
        "bshd",
        context_length=sys.maxsize,  # ms-swift limits its sequences itself
        traits=traits_of(config),
        sizes=sizes_of(config),
        accepted=accepted_masks(
            "bshd", context_parallel=config.context_parallel_size, vision=config.is_multimodal, portable=portable
        ),
        constraints=LayoutConstraints(bucket=columns),
        fp8=bool(config.fp8),
        asked=features_of(config),
    )


def sizes_of(config: TransformerConfig) -> ParallelSizes:
    """Read the parallel sizes of a model; the remaining ranks are data-parallel replicas."""
    sizes = {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "expert_tensor": config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size or 1,
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
    }
    return ParallelSizes(**sizes, data=torch.distributed.get_world_size() // ParallelSizes(**sizes).model)
