"""Anytron's layouts and masks in the calling convention of ``verl.models.mcore.util``.

verl's tensors are jagged: ``values()`` are flat, ``[T, ...]``, as in Anytron, and ``offsets()`` are the starts of
sequences. All tensors of a micro-batch are arranged by one layout, which is made before the forward pass: R rows
of C positions.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron import EngineError
from anytron.sequences import LayoutConstraints, RaggedBatch, scopes
from anytron_megatron import accepted_masks, batch_preparer, context_shard, features_of, set_mask_type, traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from megatron.core.transformer import TransformerConfig
    from torch import nn

    from anytron import ParallelSizes
    from anytron.sequences import Format
    from anytron.train import DeviceStack
    from anytron_megatron import BatchPreparer, PreparedBatch


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch with its layout.

    Attributes:
        preparer: Preparer of the micro-batch.
        prepared: Layout, mask and scope of the micro-batch.
        offsets: int64 ``[B + 1]``, starts of its sequences in flat tensors, on the device.
    """

    preparer: BatchPreparer
    prepared: PreparedBatch
    offsets: Tensor

    def arrange(self, values: Tensor, *, following: bool) -> Tensor:
        """Arrange a jagged tensor for this rank.

        Args:
            values: Jagged, ``[B, j, ...]``, on the device.
            following: Whether each position gets the value of the next one; without a next one it is 0, because verl's
                cross-entropy has no ignored label and does not use the result there.

        Returns:
            ``[R, C, ...]``.
        """
        layout, flat = self.prepared.inputs.layout, values.values()
        if not following:
            return layout.pack(flat)
        if flat.dtype is torch.int64 and flat.ndim == 1:
            return layout.next_tokens(flat).clamp_(min=0)
        ends = self.offsets[1:] - 1
        return layout.pack(flat.roll(-1, 0).index_fill(0, ends, 0))

    def nested(self, output: Tensor) -> Tensor:
        """Bring a model's output, ``[R, C, ...]``, back to a jagged tensor, ``[B, j, ...]``."""
        flat = self.preparer.postprocess(output, self.prepared)
        return torch.nested.nested_tensor_from_jagged(flat, offsets=self.offsets)


_current: contextvars.ContextVar[MicroBatch | None] = contextvars.ContextVar("anytron_verl_micro_batch", default=None)


@contextlib.contextmanager
def current_micro_batch(micro_batch: MicroBatch) -> Iterator[None]:
    """Within the block, replacements of verl's packing and padding functions use the layout of this micro-batch.

    Outside of it they call verl's originals. The block also has the micro-batch's scope: the platform's context, the
    mask, and the keys of shared prompts.
    """
    token = _current.set(micro_batch)
    try:
        with scopes.enter(micro_batch.prepared.scope()):
            yield
    finally:
        _current.reset(token)


class Layouts:
    """Layouts and masks for one of verl's models.

    Args:
        stack: Device stack of the process.
        config: Megatron's configuration of the model.
        sequence_format: verl's ``use_remove_padding``: ``thd``, else ``bshd``.
        sizes: The parallel sizes of the ranks, whose process groups exist.

    Raises:
        ConfigError: The platform lacks a feature that the model requires.
    """

    def __init__(
        self, stack: DeviceStack, config: TransformerConfig, sequence_format: Format, sizes: ParallelSizes
    ) -> None:
        self._stack = stack
        self._format = sequence_format
        self._config = config
        self._sizes = sizes
        self._preparers: dict[int, BatchPreparer] = {}
        self._preparer(1)  # what the platform declines is refused now, before anything is computed

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """Set the mask type that the platform's masks need, on modules of a vendor; portable modules need none."""
        if not self._stack.platform.portable_modules:
            set_mask_type(modules, self._preparer(1).mask_kind, self._format)

    def prepare(self, input_ids: Tensor, *, bucket: int | None = None, rows: int | None = None) -> MicroBatch:
        """Lay out a micro-batch.

        Args:
            input_ids: int64, jagged, ``[B, j]``; best on the host, where layouts are planned.
            bucket: verl's ``pad_to_length_bucket``: the packed total is a multiple of it.
            rows: verl's ``forced_max_seqlen``: length of every row, in tokens, rounded up so that ranks can split it.
        """
        align = self._sizes.tensor * context_shard().chunks
        preparer = self._preparer(bucket or (1 if rows is None else -(-rows // align) * align))
        tokens = input_ids.values().cpu()
        offsets: Tensor = input_ids.offsets()  # type: ignore[attr-defined]  # of nested tensors only
        batch = RaggedBatch(offsets.diff().cpu(), tokens, torch.ones_like(tokens, dtype=torch.bool))
        return MicroBatch(preparer, preparer.prepare(batch), offsets.to(preparer.device))

    def _preparer(self, bucket: int) -> BatchPreparer:
        if bucket not in self._preparers:
            portable, ranks = self._stack.platform.portable_modules, self._sizes.context
            self._preparers[bucket] = batch_preparer(
                self._stack,
                self._format,
                context_length=sys.maxsize,  # verl limits its sequences itself
                traits=traits_of(self._config),
                sizes=self._sizes,
                accepted=accepted_masks(self._format, context_parallel=ranks, vision=False, portable=portable),
                constraints=LayoutConstraints(bucket=bucket),
                fp8=bool(self._config.fp8),
                asked=features_of(self._config),
            )
        return self._preparers[bucket]


def preprocess_thd_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's packing: return ``(ids or values [1, C, ...], PackedSeqParams, position ids [1, C])``."""

    @functools.wraps(original)
    def preprocess(input_ids: Tensor, pre_process: bool = True, need_roll: bool = False, **options: Any) -> Any:
        micro_batch = _current.get()
        if micro_batch is None:
            return original(input_ids, pre_process=pre_process, need_roll=need_roll, **options)
        _refuse_other_shards(options)
        prepared = micro_batch.prepared
        if not pre_process:
            return input_ids, prepared.packed, None
        arranged = micro_batch.arrange(input_ids, following=need_roll)
        return arranged, prepared.packed, prepared.inputs.position_ids

    return preprocess


def preprocess_bshd_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's padding: return ``(ids or values [B, C, ...], the model's mask, position ids [B, C])``."""

    @functools.wraps(original)
    def preprocess(input_ids: Tensor, pre_process: bool = True, need_roll: bool = False, **options: Any) -> Any:
        micro_batch = _current.get()
        if micro_batch is None:
            return original(input_ids, pre_process=pre_process, need_roll=need_roll, **options)
        prepared = micro_batch.prepared
        arranged = micro_batch.arrange(input_ids, following=need_roll)
        return arranged, prepared.attention_mask, prepared.inputs.position_ids

    return preprocess


def postprocess_thd_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's unpacking: from ``[1, C, ...]`` to jagged ``[B, j, ...]``; earlier stages keep the output."""

    @functools.wraps(original)
    def postprocess(
        output: Tensor,
        packed_seq_params: Any,
        input_ids: Tensor,
        batch_size: int,
        post_process: bool = True,
        **options: Any,
    ) -> Tensor:
        micro_batch = _current.get()
        if micro_batch is None:
            result: Tensor = original(output, packed_seq_params, input_ids, batch_size, post_process, **options)
            return result
        _refuse_other_shards(options)
        return micro_batch.nested(output) if post_process else output

    return postprocess


def postprocess_bshd_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's conversion from rows: from ``[B, C, ...]`` to jagged ``[B, j, ...]``."""

    @functools.wraps(original)
    def postprocess(output: Tensor, attention_mask: Tensor | None, post_process: bool = True) -> Tensor:
        micro_batch = _current.get()
        if micro_batch is None:
            result: Tensor = original(output, attention_mask, post_process)
            return result
        return micro_batch.nested(output) if post_process else output

    return postprocess


def _refuse_other_shards(options: dict[str, Any]) -> None:
    """Refuse ways of sharding for which Anytron has no layout.

    Raises:
        EngineError: verl requests such a way.
    """
    wanted = [name for name in ("local_cp_size", "min_local_rows") if options.get(name) is not None]
    if options.get("cp_layout", "zigzag") != "zigzag":
        wanted.append("cp_layout")
    if wanted:
        raise EngineError(
            "Anytron has no layout for this way of sharding sequences.",
            where="verl.models.mcore.util",
            why=f"verl requests {', '.join(wanted)}",
            fix="turn dynamic_context_parallel off, or set VERL_USE_EXTERNAL_PLUGINS=none to run verl without Anytron",
        )
