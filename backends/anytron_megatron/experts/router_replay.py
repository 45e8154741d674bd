"""Router replay: tokens go to the experts to which they went when the old log-probs were computed.

Between the pass that computes old log-probs and an update the weights move, or only the order of a sum
changes, and a token near a decision is routed to other experts. Its probability ratio then compares two
different networks. Megatron's ``RouterReplay`` (one object in each router) records the choice of experts
and replays it; this file brings it to token coordinates and back, whatever the layout of either pass,
and ties it to a micro-batch's scope, so that recomputation replays the same.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from anytron.errors import EngineError
from anytron.sequences.parallel import gather_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.sequences import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import PreparedBatch


class RouterReplays:
    """The routers of one model, built with ``moe_enable_routing_replay``, on this rank, and which of all they are.

    Routers of multi-token prediction are left alone: they do not run where log-probs are computed.
    Making one is a collective over pipeline stages.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
        self._experts, self._topk = config.num_moe_experts, config.moe_router_topk
        self._shared_out = config.sequence_parallel
        self._chunks = [_routers(chunk) for chunk in chunks]
        mine = [router.layer_number for routers in self._chunks for router in routers]
        everywhere: list[list[int]] = [[] for _ in range(parallel_state.get_pipeline_model_parallel_world_size())]
        torch.distributed.all_gather_object(everywhere, mine, group=parallel_state.get_pipeline_model_parallel_group())
        layers = sorted(number for numbers in everywhere for number in numbers)
        self._columns = {number: column for column, number in enumerate(layers)}
        self._recorded: list[list[Tensor]] = []

    def start_recording(self) -> None:
        """Forget what an earlier pass recorded."""
        self._recorded = [[] for _ in self._chunks]

    def recording(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory:
        """Make the scope of a forward pass that records."""
        return partial(self._record, chunk, prepared.inputs.layout)

    def recorded(self) -> list[Tensor]:
        """Collect the routing of all layers. A collective over pipeline stages.

        Returns:
            One tensor for each micro-batch since :meth:`start_recording`: ``[T, layers, topk]`` on the host,
            uint8, or int16 where there are more than 256 experts.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        numbers = [router.layer_number for routers in self._chunks for router in routers]
        mine = torch.tensor([self._columns[number] for number in numbers], dtype=torch.int64)
        collected = []
        for parts in zip(*self._recorded, strict=True):
            local = torch.cat(parts, dim=1)
            whole = local.new_zeros(local.shape[0], len(self._columns), self._topk)
            whole[:, mine.to(whole.device)] = local
            if group.size() > 1:
                torch.distributed.all_reduce(whole, group=group)
            collected.append(whole.to(torch.uint8 if self._experts <= 256 else torch.int16).cpu())
        return collected

    def replaying(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory:
        """Make the scope of a forward pass, or its recomputation, that routes as ``prepared.batch.routing`` says.

        Raises:
            EngineError: The batch carries no routing, or that of another model.
        """
        routing = prepared.batch.routing
        if routing is None or tuple(routing.shape[1:]) != (len(self._columns), self._topk):
            found = "none" if routing is None else f"{tuple(routing.shape)}"
            raise EngineError(
                "The batch has no routing to replay.",
                where="update",
                why=f"expected (tokens, {len(self._columns)} layers, {self._topk} experts), found {found}",
                fix="compute old log-probs with this engine first (engine.options.router_replay)",
            )
        routers = self._chunks[chunk]
        return partial(_replay, routers, self._to_slots(routing, routers, prepared.inputs.layout))

    @contextlib.contextmanager
    def _record(self, chunk: int, layout: SequenceLayout) -> Iterator[None]:
        routers = self._chunks[chunk]
        with _acting(routers, RouterReplayAction.RECORD):
            yield
            chosen = [router.router_replay.get_recorded_indices() for router in routers]
            self._recorded[chunk].append(self._to_tokens(chosen, layout))

    def _to_tokens(self, chosen: Sequence[Tensor], layout: SequenceLayout) -> Tensor:
        """Bring routers' choices, int64 ``[N, K]`` of this rank's tokens each, to int32 ``[T, layers, K]``."""
        if not chosen:
            return layout.slot_index.new_zeros(layout.num_tokens, 0, self._topk, dtype=torch.int32)
        # Routers see tokens as [S, B]; with sequence parallelism each rank has a part of them.
        slots = torch.stack(list(chosen), dim=1).to(torch.int32)
        if self._shared_out:
            slots = gather_slots(parallel_state.get_tensor_model_parallel_group())(slots)
        rows, columns = layout.shape
        group = layout.shard.group
        values = slots.view(columns, rows, len(chosen), self._topk).transpose(0, 1)
        return layout.unpack(values, gather_slots(group) if group is not None else None)

    def _to_slots(self, routing: Tensor, routers: Sequence[TopKRouter], layout: SequenceLayout) -> list[Tensor]:
        """Undo :meth:`_to_tokens` for some routers: int64 ``[N, K]`` each."""
        if not routers:
            return []
        columns = [self._columns[router.layer_number] for router in routers]
        mine = routing[:, columns].to(layout.slot_index.device, torch.int64)
        values = layout.pack(mine)  # [R, C, layers, K]
        # Every token goes to `topk` different experts, padding too: Megatron's dispatcher counts on it.
        place = torch.arange(layout.token_index.numel(), device=mine.device)
        spread = (place[:, None] * self._topk + torch.arange(self._topk, device=mine.device)) % self._experts
        values = torch.where(layout.valid[..., None, None], values, spread.view(*layout.shape, 1, self._topk))
        slots = values.transpose(0, 1)
        if self._shared_out:
            group = parallel_state.get_tensor_model_parallel_group()
            slots = slots.chunk(group.size())[group.rank()]
        return list(slots.flatten(0, 1).unbind(1))


def _routers(chunk: nn.Module) -> list[TopKRouter]:
    """The routers of a chunk's own layers, in order."""
    return [
        module
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
    ]


@contextlib.contextmanager
def _replay(routers: Sequence[TopKRouter], targets: Sequence[Tensor]) -> Iterator[None]:
    with _acting(routers, RouterReplayAction.REPLAY_FORWARD):
        for router, target in zip(routers, targets, strict=True):
            router.router_replay.set_target_indices(target)
        yield


@contextlib.contextmanager
def _acting(routers: Sequence[TopKRouter], action: RouterReplayAction) -> Iterator[None]:
    """Let routers record or replay, and leave nothing behind."""
    for router in routers:
        router.router_replay.set_router_replay_action(action)
    try:
        yield
    finally:
        for router in routers:
            router.router_replay.clear_router_replay_action()
            router.router_replay.clear_indices()
