"""Forward passes of the policy with a cache of keys and values: Megatron's static inference context.

A step writes the same column of the cache for all rows. So all rows begin in the same column and have no padding. While
rows with a longer prompt still receive prompt tokens, other rows already receive drawn tokens.

Legend: B rows, C columns (positions), V vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from anytron.sequences import scopes
from anytron.sequences.batch import RaggedBatch
from anytron_megatron.models.release import static_inference_context
from anytron_megatron.training import parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from megatron.core.transformer.module import MegatronModule
    from torch import Tensor, nn

    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import ModelChunk


SWITCHES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes of modules and their configurations that turn sequence parallelism on
(``megatron/core/transformer/utils.py``)."""


class Cache:
    """The cache of one batch, and the forward passes that fill and read it. All methods are collectives.

    The caller must switch the output layer to logits, and turn sequence parallelism and gradients off.

    Args:
        chunks: The policy on this rank.
        preparer: Preparer that arranges sequences as padded rows (bshd).
        pipeline: Number of pipeline stages; rows are divided into as many micro-batches, so that all stages work.
        rows: B, the number of sequences.
        columns: C, the largest number of tokens of a row.
    """

    def __init__(
        self, chunks: Sequence[ModelChunk], preparer: BatchPreparer, *, pipeline: int, rows: int, columns: int
    ) -> None:
        self._chunks, self._preparer, self._rows = chunks, preparer, rows
        each = -(-rows // pipeline)
        self._micro_batches = [slice(start, start + each) for start in range(0, each * pipeline, each)]
        self._context = static_inference_context(each * pipeline, columns)

    def prefill(self, tokens: Tensor) -> None:
        """Fill the first C' columns of the cache from ``tokens``, int64 ``[B, C']`` on the host."""
        tokens, context = self._with_fillers(tokens), self._context
        # A plugin may want rows to be padded: the padding's keys lie behind the real ones until these are overwritten.
        width = self._preparer.plan(torch.tensor([tokens.shape[1]]), parallel.context_shard()).max_seqlen
        context.max_sequence_length = max(context.max_sequence_length, width)

        def forward(module: MegatronModule, rows: slice) -> Tensor:
            part = tokens[rows]
            count, columns = part.shape
            flat = part.flatten()
            batch = RaggedBatch(torch.full((count,), columns), flat, torch.zeros_like(flat, dtype=torch.bool))
            prepared = self._preparer.prepare(batch)
            with scopes.enter(prepared.scope()):
                return self._call(module, **prepared.arguments())

        self._run(forward)
        context.sequence_len_offset = tokens.shape[1]
        context.enable_decode_mode()

    def step(self, tokens: Tensor) -> Tensor | None:
        """Add one token to each row: ``tokens``, int64 ``[B]`` on the host.

        Returns:
            The logits after this token, float32 ``[B, padded V]``, on the last pipeline stage; None elsewhere.
        """
        fed = self._with_fillers(tokens[:, None]).to(self._preparer.device, non_blocking=True)
        positions = torch.full_like(fed, self._context.sequence_len_offset)

        def forward(module: MegatronModule, rows: slice) -> Tensor:
            return self._call(module, input_ids=fed[rows], position_ids=positions[rows], attention_mask=None)

        logits = self._run(forward)
        self._context.sequence_len_offset += 1
        self._context.enable_decode_mode()
        return torch.cat(logits)[: self._rows, -1].float() if logits else None

    def _call(self, module: MegatronModule, **arguments: Any) -> Tensor:
        output: Tensor = module(**arguments, inference_context=self._context, runtime_gather_output=True)
        return output

    def _run(self, forward: Callable[[MegatronModule, slice], Tensor]) -> list[Tensor]:
        """Let Megatron's schedule drive the chunks; return the outputs of the last stage, by micro-batch.

        ``forward`` runs a chunk on some of the rows.
        """

        def forward_step(micro_batches: Iterator[slice], module: MegatronModule) -> tuple[Tensor, Callable[..., Any]]:
            rows = next(micro_batches)
            self._context.batch_size_offset = rows.start
            return forward(module, rows), lambda output, non_loss_data: output  # noqa: ARG005 - Megatron's signature

        outputs: list[Tensor] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(self._micro_batches) for _ in self._chunks],
            model=[chunk.module for chunk in self._chunks],
            num_microbatches=len(self._micro_batches),
            seq_length=1,  # as the next one not used: stages tell each other the real shapes
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return outputs

    def _with_fillers(self, tokens: Tensor) -> Tensor:
        """Add rows of zeros, so that all micro-batches have equally many."""
        missing = self._micro_batches[-1].stop - len(tokens)
        return torch.cat([tokens, tokens.new_zeros(missing, tokens.shape[1])])


@contextlib.contextmanager
def without_sequence_parallel(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Turn sequence parallelism off in the ``with`` block: a step has one token per sequence, which cannot be split.

    Afterwards only modules in which it was on are turned on again. (Megatron's ``set_model_to_sequence_parallel`` turns
    it on in every module with such an attribute, even in modules that were built without sequence parallelism.)
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    configs = [module.config for module in modules if hasattr(module, "config")]
    holders = {id(holder): holder for holder in (*modules, *configs)}.values()
    on = [(holder, name) for holder in holders for name in SWITCHES if vars(holder).get(name) is True]
    for holder, name in on:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name in on:
            setattr(holder, name, True)
