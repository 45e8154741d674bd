"""What each module of a model computes for each token, as digests: two passes over the same tokens can be compared.

A digest is a sum of a row's bits times odd numbers, modulo 2**64: whole numbers, which have the same sum in any order.
"""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anytron.workers.engines.tracing import LOG_PROB, OUTPUT, Trace, TracedTensor
from anytron_megatron.training.heads import TokenScoreHead
from anytron_megatron.training.schedule import forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from anytron.sequences.batch import RaggedBatch
    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch
    from anytron_megatron.training.schedule import ModelChunk

_LEFT_OUT = re.compile(r"(^|\.)(experts(\.|$)|embedding\.)")
"""Modules that are not traced: rows of experts are sorted by expert, and parts of the embedding have the sequences in
the first dimension, so that as many sequences as columns would be taken for each other."""
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAST = 1 << 30
"""Place of the log-probs in the order of the pipeline's stages."""

_Slots = tuple[tuple[int, int], Tensor]
"""A shape (R, C), and the token in each of its slots, int64 ``[R, C]`` on the device, negative = none."""


class Tracer:
    """Hooks on the modules of a model, and the digests of what they took and gave.

    A tensor is traced if its shape shows which row belongs to which token.

    Args:
        chunks: The model on this rank.
        micro_batches: The micro-batches of the pass. Tokens are numbered through all of them.
        rows_of: Name and kind of the tensor whose rows are kept (:attr:`TracedTensor.key`); None = no rows are kept.
    """

    def __init__(
        self, chunks: Sequence[ModelChunk], micro_batches: Sequence[RaggedBatch], rows_of: tuple[str, str] | None
    ) -> None:
        self._chunks, self._rows_of = chunks, rows_of
        self._micro_batches = micro_batches
        self._tokens = sum(batch.num_tokens for batch in micro_batches)
        self._passed = [0] * len(chunks)
        self._slots: list[_Slots] = []
        self._calls: dict[str, int] = {}
        self._found: dict[tuple[str, str], TracedTensor] = {}
        self._rows: Tensor | None = None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the forward passes in the ``with`` block, without the output layers."""
        handles: list[RemovableHandle] = []
        try:
            for number, chunk in enumerate(self._chunks):
                stages = parallel_state.get_pipeline_model_parallel_world_size()
                stage = number * stages + parallel_state.get_pipeline_model_parallel_rank()
                for name, module in _traced_modules(chunk.module):
                    takes, gives = partial(self._takes, stage, name), partial(self._gives, stage, name)
                    handles.append(module.register_forward_pre_hook(takes, with_kwargs=True))
                    handles.append(module.register_forward_hook(gives))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def tracing_generation(self, prefilled: int) -> Iterator[None]:
        """Trace the passes of a cache over one micro-batch, whose first pass reads ``prefilled`` tokens of each row."""
        handles = [
            chunk.module.register_forward_pre_hook(partial(self._begin_step, prefilled), with_kwargs=True, prepend=True)
            for chunk in self._chunks
        ]
        try:
            with self.tracing():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        """Note where the tokens of the next micro-batch are; the schedule calls this as a :class:`Feature`."""
        number = min(self._passed[chunk], len(self._micro_batches) - 1)
        self._passed[chunk] += 1
        offset = sum(batch.num_tokens for batch in self._micro_batches[:number])
        layout = prepared.inputs.layout
        self._slots = [_slots(one, prepared, offset) for one in (layout, layout.taken)]
        self._calls.clear()
        return None

    def add_log_probs(self, values: Tensor, computed: Tensor) -> None:
        """Add the log-probs of tokens, float32 ``[T]``, where ``computed``, bool ``[T]``, is True."""
        self._keep(_LAST, LOG_PROB, OUTPUT, values[computed, None], computed.nonzero()[:, 0])

    def trace(self) -> Trace:
        """Return what was found, in the order of computation."""
        return Trace(tuple(self._found.values()), self._rows)

    def _begin_step(self, prefilled: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module, args
        context, shape = kwargs["inference_context"], kwargs["input_ids"].shape
        (batch,) = self._micro_batches
        first, read = context.batch_size_offset, context.sequence_len_offset
        rows, columns = torch.arange(first, first + shape[0]), torch.arange(shape[1])
        known = rows < batch.num_sequences  # the others fill up
        rows = rows.clamp(max=batch.num_sequences - 1)
        starts = torch.cumsum(batch.lengths, 0) - batch.lengths
        real = columns < (max(prefilled, 1) if read == 0 else 1)
        real = real & known[:, None] & (read + columns < batch.lengths[rows, None])
        index = torch.where(real, starts[rows, None] + read + columns, -1)
        self._slots = [((shape[0], shape[1]), index.to(kwargs["input_ids"].device))]
        self._calls.clear()

    def _takes(self, stage: int, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls[name] = self._calls.get(name, 0) + 1
        # Other named arguments are not the same in training and generation.
        taken = [*args, *([kwargs["hidden_states"]] if "hidden_states" in kwargs else [])]
        self._look(stage, name, module, "input", taken)

    def _gives(self, stage: int, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del args
        self._look(stage, name, module, OUTPUT, tree_leaves(output))

    def _look(self, stage: int, name: str, module: nn.Module, kind: str, values: Sequence[object]) -> None:
        call = "" if self._calls[name] == 1 else f" of call {self._calls[name]}"
        tensors = (one for one in values if isinstance(one, Tensor) and one.is_floating_point())
        for number, tensor in enumerate(tensors, start=1):
            rows = self._by_token(tensor.detach(), module)
            if rows is not None:
                self._keep(stage, name, (kind if number == 1 else f"{kind} {number}") + call, *rows)

    def _by_token(self, values: Tensor, module: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return the rows of tokens, ``[N, W]``, and the tokens, int64 ``[N]``; None if the shape does not fit."""
        for (rows, columns), index in self._slots:
            shape = tuple(values.shape[:2])
            if values.ndim < 2:
                return None
            if shape == (columns, rows):
                flat, tokens = values.flatten(0, 1), index.t()
            elif shape == (rows, columns):
                flat, tokens = values.flatten(0, 1), index
            elif shape[0] == rows * columns and (rows == 1 or (columns == 1 and values.ndim == 2)):
                flat, tokens = values, index
            elif getattr(getattr(module, "config", None), "sequence_parallel", False):
                size = parallel_state.get_tensor_model_parallel_world_size()
                if (shape[0] * size, shape[1]) != (columns, rows):
                    continue
                begin = parallel_state.get_tensor_model_parallel_rank() * shape[0]
                flat, tokens = values.flatten(0, 1), index.t()[begin : begin + shape[0]]
            else:
                continue
            real = (tokens.flatten() >= 0).nonzero()[:, 0]
            return flat.flatten(1)[real], tokens.flatten()[real]
        return None

    def _keep(self, stage: int, name: str, kind: str, rows: Tensor, tokens: Tensor) -> None:
        tokens = tokens.cpu()
        key = (name, kind)
        if key not in self._found:
            nothing = torch.zeros(self._tokens, dtype=torch.int64)
            self._found[key] = TracedTensor(name, kind, stage, rows.shape[1], nothing, nothing.bool())
        self._found[key].digests[tokens] = digest(rows).cpu()
        self._found[key].computed[tokens] = True
        if key == self._rows_of:
            if self._rows is None:
                self._rows = torch.zeros(self._tokens, rows.shape[1])
            self._rows[tokens] = rows.float().cpu()


def digest(rows: Tensor) -> Tensor:
    """Return a number for each row, int64 ``[N]``, that is equal for rows of equal bits; 0 and -0 are equal.

    ``rows`` is ``[N, W]`` of any floating-point type. Rows that differ in one entry have different numbers; other rows
    that differ have equal ones with a probability of about 2**-64.
    """
    bits = (rows + 0.0).contiguous().view(_WHOLE_NUMBERS[rows.element_size()]).long()
    factors = torch.arange(rows.shape[1], device=rows.device) * -7046029254386353131  # the golden ratio's bits
    factors = (factors ^ (factors >> 29)) * -4658895280553007687  # SplitMix64's
    return (bits * (factors | 1)).sum(-1)


def trace_training(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    rows_of: tuple[str, str] | None,
    multiple: int,
) -> Trace:
    """Score micro-batches as training does, and trace it; see :meth:`TraceableEngine.trace`. A collective.

    The number of micro-batches is filled up to a multiple of ``multiple``, with copies of the last one.
    """
    tracer = Tracer(chunks, micro_batches, rows_of)
    fillers = [micro_batches[-1]] * (-len(micro_batches) % multiple)
    with tracer.tracing():
        outputs = forward(chunks, [*micro_batches, *fillers], preparer, tracer.begin)
    if outputs:
        values = [one.log_probs for one in outputs[: len(micro_batches)] if one.log_probs is not None]
        tracer.add_log_probs(torch.cat(values), torch.cat([one.response_mask for one in micro_batches]))
    return tracer.trace()


def _traced_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with names in which layers have their number in the whole model, not in the pipeline's stage."""
    numbers: dict[str, str] = {}
    for name, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        if isinstance(number, int) and re.search(r"(^|\.)layers\.\d+$", name):
            numbers[name] = re.sub(r"\d+$", str(number - 1), name)
    for name, module in model.named_modules():
        head = isinstance(getattr(getattr(module, "forward", None), "__self__", None), TokenScoreHead)
        if not name or head or _LEFT_OUT.search(name):
            continue
        layer = next((one for one in numbers if name == one or name.startswith(f"{one}.")), "")
        yield numbers.get(layer, "") + name[len(layer) :], module


def _slots(layout: SequenceLayout, prepared: PreparedBatch, offset: int) -> _Slots:
    index = torch.where(layout.valid.flatten(), layout.token_index, -1)
    if prepared.prompts is not None:
        pieces = prepared.prompts.pieces.tokens.to(index.device)
        index = torch.where(index >= 0, pieces[index.clamp(min=0)], -1)
    return layout.shape, torch.where(index >= 0, index + offset, -1).view(layout.shape)
