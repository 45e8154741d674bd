"""A model's gradients under Hugging Face names, and the search for the first non-finite number of an update."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anytron.algorithms.importance import with_moments_resolved
from anytron.base.metric import joined
from anytron.workers.engines.training_engine import Inspection, NonFinite
from anytron_megatron.training.schedule import forward_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.distributed import DistributedDataParallel
    from torch.utils.hooks import RemovableHandle

    from anytron.algorithms.contract import LossFunction, LossOutputs
    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch
    from anytron_megatron.training.schedule import Feature, ModelChunk


SCALE = 2.0**40
"""Factor by which gradients are multiplied during an export. Some exports add 1 to the weights of norms: after the
division by this factor, only 1e-12 of that 1 is left in the gradient."""

UNTRAINED = 2.0**120
"""Value that marks parameters and buffers without a gradient during an export; bfloat16 represents it exactly."""

What = Literal["output", "loss", "gradient of its input", "gradient of its output", "gradient"]


@torch.no_grad()
def gather_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Gather the reduced gradients, which a distributed optimizer leaves in shards, on each data-parallel replica.

    A collective over data-parallel replicas.
    """
    for chunk in wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = shard_buffer(bucket.grad_data, replicas.size())[replicas.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=replicas)


def named_gradients(
    modules: Sequence[nn.Module], export: Callable[[], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients in ``main_grad``, float32, under the names of an export. A collective, like the export.

    The function that exports weights also exports gradients, which replace the weights meanwhile: so shards are
    gathered and joined layers are split in the same way. Frozen parameters and buffers, which have no gradients, are
    left out. Afterwards ``main_grad`` must not be used for an update.

    Args:
        modules: The model on this rank.
        export: Function that exports the model's parameters.
    """
    with _in_place_of_weights(modules):
        for name, tensor in export():
            if not bool((tensor == UNTRAINED).any()):
                yield name, tensor.float() / SCALE


@contextlib.contextmanager
def _in_place_of_weights(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace parameters by their gradients. Writing into the parameters would reset their gradient accumulators."""
    owners = [owner for module in modules for owner in module.modules()]
    own = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in owners]
    scaled: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for owner, parameters, buffers in own:
            for name, parameter in parameters.items():
                if parameter is not None:
                    if parameter not in scaled:  # tied parameters have several owners
                        scaled[parameter] = nn.Parameter(_gradient(parameter), requires_grad=False)
                    owner._parameters[name] = scaled[parameter]
            for name, buffer in buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    owner._buffers[name] = torch.full_like(buffer, UNTRAINED)
        yield
    finally:
        for owner, parameters, buffers in own:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if not parameter.requires_grad:
        return torch.full_like(parameter, UNTRAINED)
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's data-parallel wrapper sets it
    return gradient.mul_(SCALE)


def inspect_update(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    loss_fn: LossFunction,
    *features: Feature,
) -> Inspection:
    """Do the passes of an update and check every number; see :meth:`InspectableEngine.inspect_update`.

    The arguments are as for :func:`~anytron_megatron.training.schedule.forward_backward`; the result is for this rank.
    """
    weights = tuple(
        _name(name)
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if not bool(parameter.isfinite().all())
    )
    watch = _Watch(chunks)
    try:
        parts = forward_backward(chunks, micro_batches, preparer, partial(watch.loss, loss_fn), watch.begin, *features)
    finally:
        watch.end()
    metrics = {name: joined(name, [float(part[name]) for part in parts]) for name in parts[0]}
    return Inspection(weights, watch.first, with_moments_resolved(metrics))


class _Watch:
    """Hooks on all modules and parameters of a model, and what they have found.

    They check each module's output in the forward pass, and the gradients of modules' inputs and outputs in the
    backward pass. Inner modules are checked before outer ones, so that the first finding is where the number arose.
    ``torch.autograd.detect_anomaly`` would name an operation instead of the module, and misses infinities.

    Attributes:
        first: The first number that was not finite.
    """

    def __init__(self, chunks: Sequence[ModelChunk]) -> None:
        self.first: NonFinite | None = None
        self._gradient: Tensor | None = None  # the one in which it was found
        self._micro_batch = -1
        self._prepared: PreparedBatch | None = None
        self._handles: list[RemovableHandle] = []
        for chunk in chunks:
            for name, module in chunk.module.named_modules():
                name = _name(name)  # noqa: PLW2901 - without the data-parallel wrapper
                takes, gives = partial(self._takes, name), partial(self._gives, name)
                self._handles.append(module.register_forward_pre_hook(takes, with_kwargs=True))
                self._handles.append(module.register_forward_hook(gives))
            for name, parameter in chunk.module.named_parameters():
                if parameter.requires_grad:
                    found = partial(self._look_at_gradient, _name(name), "gradient")
                    self._handles.append(parameter.register_hook(found))

    def begin(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        """Record which micro-batch is next; the schedule calls this as a :class:`Feature`."""
        del chunk
        self._micro_batch += 1
        self._prepared = prepared
        return None

    def loss(self, loss_fn: LossFunction, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute a micro-batch's loss; check it and the gradients of its inputs."""
        for name, values in vars(outputs).items():
            for tensor in tree_leaves(values):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, f"loss (by {name})", "gradient of its input"))
        part = loss_fn(outputs, batch)
        self._look("loss", "loss", part.loss)
        return part

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _takes(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._look_at_gradient, name, "gradient of its input"))

    def _gives(self, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._look(name, "output", tensor.detach())
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, name, "gradient of its output"))

    def _look_at_gradient(self, name: str, what: What, gradient: Tensor) -> None:
        """Look at a gradient. Of the modules that share the tensor, the last one that took it is named."""
        if self.first is None or self._gradient is gradient:
            before, self.first = self.first, None
            self._look(name, what, gradient)
            self._gradient = gradient if self.first is not None else self._gradient
            self.first = self.first or before

    def _look(self, name: str, what: What, values: Tensor) -> None:
        """Record the first number that is not finite, and its token as soon as a tensor has one row for each token."""
        known = self.first
        if known is not None and known.token is not None:
            return
        if known is not None and (known.what != what or known.micro_batch != self._micro_batch):
            return
        bad = ~values.isfinite()
        place = self._token(bad)
        if place is _PADDING or not bool(bad.any()):
            return
        if known is None:
            known = NonFinite(
                place=name,
                what=what,
                value=_spelled(float(values[bad][0])),
                count=int(bad.sum()),
                size=bad.numel(),
                micro_batch=self._micro_batch,
            )
        if isinstance(place, tuple):
            known = replace(known, sequence=place[0], token=place[1])
        self.first = known

    def _token(self, bad: Tensor) -> tuple[int, int] | object | None:
        """Find sequence and token of the first bad number.

        Returns:
            Both; None if the tensor has no row for each token, :data:`_PADDING` if only padding is bad.
        """
        prepared = self._prepared
        if prepared is None:
            return None
        batch, layout = prepared.batch, prepared.inputs.layout
        if bad.ndim >= 1 and bad.shape[0] == batch.num_tokens:
            tokens = bad.flatten(1).any(-1) if bad.ndim > 1 else bad
            return _place(batch.lengths, int(tokens.nonzero()[0])) if bool(tokens.any()) else None
        for arranged in (layout, layout.taken):
            rows, columns = arranged.shape
            if bad.ndim >= 2 and tuple(bad.shape[:2]) == (columns, rows):
                slots = bad.flatten(2).any(-1).t() if bad.ndim > 2 else bad.t()
            elif bad.ndim >= 2 and tuple(bad.shape[:2]) == (rows, columns):
                slots = bad.flatten(2).any(-1) if bad.ndim > 2 else bad
            elif rows == 1 and bad.ndim >= 1 and bad.shape[0] == columns:
                slots = (bad.flatten(1).any(-1) if bad.ndim > 1 else bad)[None]
            else:
                continue
            if not bool(slots.any()):
                return None
            real = (slots & arranged.valid).flatten().nonzero()
            if not len(real):
                return _PADDING
            token = int(arranged.token_index[real[0, 0]])
            return _place(
                batch.lengths, token if prepared.prompts is None else int(prepared.prompts.pieces.tokens[token])
            )
        return None


_PADDING = object()
"""Result of ``_token`` if only padding is bad, which reaches no loss."""


def _place(lengths: Tensor, token: int) -> tuple[int, int]:
    """Sequence of a flat token, and its position there."""
    ends = torch.cumsum(lengths, 0)
    sequence = int(torch.searchsorted(ends, token, right=True))
    return sequence, token - int(ends[sequence] - lengths[sequence])


def _name(name: str) -> str:
    """A module's or parameter's name in the model, without the prefix of the data-parallel wrapper."""
    return name.removeprefix("module.")


def _spelled(number: float) -> str:
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
