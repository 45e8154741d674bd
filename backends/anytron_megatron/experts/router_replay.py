"""Router replay: tokens are sent to the experts that were chosen in an earlier pass.

With ``old-log-probs`` the earlier pass is the one that computed old log-probs. Between that pass and an update the
weights may change, or the same sums may be computed in another order, so that a token whose best experts have nearly
equal scores may go to other experts; its probability ratio would then compare two different networks. With ``rollout``
the earlier pass is the rollout, which used other kernels: then both engines compute with the same experts, and scoring
passes replay too.

Megatron's routers pass their top-k to an object, if they have one (``TopKRouter.router_replay``). Here they have one
only within a micro-batch's scope, so that recomputation replays the same choices, and no state remains. (Megatron's own
class replays all tokens or none.) This file converts choices to token coordinates and back, for any layout of the two
passes.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from anytron.base.errors import EngineError
from anytron.sequences.layout import gather_slots
from anytron.workers.engines.rollout_engine import RoutingShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import PreparedBatch

    TopK = Callable[..., tuple[Tensor, Tensor]]
    """Megatron's own choice: (scores ``[N, E]``, topk, num_groups=, group_topk=) -> values and experts ``[N, K]``."""

METRIC = "moe/rerouted_fraction"
_OWN = -1
"""Stands in place of an expert's number where the router itself chooses."""


class RouterReplays:
    """The routers of one model on this rank, and their positions among all routers of the model.

    Routers of multi-token prediction are not replayed: they do not run when log-probs are computed.
    The constructor is a collective over pipeline stages.

    Args:
        chunks: The model's chunks on this rank.
        config: Configuration of the model.
        from_rollout: Whether batches contain the rollout's routing; otherwise routing is recorded.

    Attributes:
        from_rollout: Whether the routing comes from the rollout.
        shape: Numbers of layers with a router, of experts chosen for a token, and of all experts, in the whole model.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig, *, from_rollout: bool) -> None:
        self.from_rollout = from_rollout
        self._shared_out = config.sequence_parallel
        self._chunks = [_routers(chunk) for chunk in chunks]
        mine = [router.layer_number for routers in self._chunks for router in routers]
        everywhere: list[list[int]] = [[] for _ in range(parallel_state.get_pipeline_model_parallel_world_size())]
        torch.distributed.all_gather_object(everywhere, mine, group=parallel_state.get_pipeline_model_parallel_group())
        layers = sorted(number for numbers in everywhere for number in numbers)
        self._columns = {number: column for column, number in enumerate(layers)}
        self.shape = RoutingShape(len(layers), config.moe_router_topk, config.num_moe_experts)
        self._device = next(chunks[0].parameters()).device
        self._recorded: list[list[Tensor]] = []
        self._replays: list[_Replay] = []

    def start(self) -> None:
        """Begin a pass: reset records and counts of an earlier pass."""
        self._recorded = [[] for _ in self._chunks]
        self._replays = []

    def recording(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory:
        """Make the scope of a forward pass that records the routers' choices."""
        return partial(self._record, chunk, prepared.inputs.layout)

    def recorded(self) -> list[Tensor]:
        """Collect the routing of all layers. A collective over pipeline stages.

        Returns:
            One tensor for each micro-batch since :meth:`start`: ``[T, layers, topk]``, numbers of experts, on the host;
            its dtype is ``shape.dtype``.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        numbers = [router.layer_number for routers in self._chunks for router in routers]
        mine = torch.tensor([self._columns[number] for number in numbers], dtype=torch.int64)
        collected = []
        for parts in zip(*self._recorded, strict=True):
            local = torch.cat(parts, dim=1)
            whole = local.new_zeros(local.shape[0], self.shape.layers, self.shape.chosen)
            whole[:, mine.to(whole.device)] = local
            if group.size() > 1:
                torch.distributed.all_reduce(whole, group=group)
            collected.append(whole.to(self.shape.dtype).cpu())
        return collected

    def replaying(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory:
        """Make the scope of a forward pass, or its recomputation, that routes as ``prepared.batch.routing`` says.

        Raises:
            EngineError: The batch has no routing, or its routing has the shape of another model's.
        """
        routing = prepared.batch.routing
        expected = self.shape.layers, self.shape.chosen
        if routing is None or tuple(routing.shape[1:]) != expected:
            shape = f"(tokens, {expected[0]} layers, {expected[1]} chosen experts)"
            raise EngineError(
                "A micro-batch has no routing to replay in this model.",
                where="RaggedBatch.routing",
                why=f"its shape must be {shape}, but the batch has no routing"
                if routing is None
                else f"its shape must be {shape}, but it is {tuple(routing.shape)}",
                fix="put the routing of the rollout's responses (Response.routing) into RaggedBatch.routing"
                if self.from_rollout
                else "score the micro-batches with this engine before the update, and put TokenOutputs.routing into "
                "RaggedBatch.routing",
            )
        routers = self._chunks[chunk]
        weights = self._weights(prepared)
        targets = self._to_slots(routing, routers, prepared.inputs.layout)
        replays = [_Replay(target, weights) for target in targets]
        self._replays += replays
        return partial(_choosing, routers, replays)

    def metrics(self) -> dict[str, float]:
        """Return how often this replica's routers would choose other experts. A collective over the replica's ranks.

        Returns:
            The share of tokens, of those that predict a response token, that go to at least one expert outside the
            router's own top-k; mean over layers. It must be summed over data-parallel replicas.

        Raises:
            EngineError: A router of a pass that replays routing has not asked for the experts.
        """
        counted = [replay.rerouted for replay in self._replays if replay.rerouted is not None]
        if len(counted) < len(self._replays):
            raise _unasked()
        total = torch.stack([torch.zeros((), device=self._device), *counted]).sum()
        # Ranks that share a micro-batch's tokens have different ones.
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_and_context_parallel_group())
        torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return {METRIC: float(total) / self.shape.layers}

    @contextlib.contextmanager
    def _record(self, chunk: int, layout: SequenceLayout) -> Iterator[None]:
        routers = self._chunks[chunk]
        records = [_Record() for _ in routers]
        with _choosing(routers, records):
            yield
        chosen = [record.experts for record in records if record.experts is not None]
        if len(chosen) < len(records):
            raise _unasked()
        self._recorded[chunk].append(self._to_tokens(chosen, layout))

    def _to_tokens(self, chosen: Sequence[Tensor], layout: SequenceLayout) -> Tensor:
        """Bring routers' choices, int64 ``[N, K]`` of this rank's tokens each, to int32 ``[T, layers, K]``."""
        if not chosen:
            return layout.slot_index.new_zeros(layout.num_tokens, 0, self.shape.chosen, dtype=torch.int32)
        # Routers see tokens as [S, B]; with sequence parallelism each rank has a part of them.
        slots = torch.stack(list(chosen), dim=1).to(torch.int32)
        if self._shared_out:
            slots = gather_slots(parallel_state.get_tensor_model_parallel_group())(slots)
        rows, columns = layout.shape
        group = layout.shard.group
        values = slots.view(columns, rows, len(chosen), self.shape.chosen).transpose(0, 1)
        return layout.unpack(values, gather_slots(group) if group is not None else None)

    def _to_slots(self, routing: Tensor, routers: Sequence[TopKRouter], layout: SequenceLayout) -> list[Tensor]:
        """Undo :meth:`_to_tokens` for some routers: int64 ``[N, K]`` each, :data:`_OWN` where nothing is replayed."""
        if not routers:
            return []
        columns = [self._columns[router.layer_number] for router in routers]
        mine = routing[:, columns].to(layout.slot_index.device, torch.int64)
        if self.from_rollout:
            mine.index_fill_(0, layout.cu_seqlens[1:].long() - 1, _OWN)
        return list(self._of_this_rank(layout.pack(mine, fill=_OWN)).unbind(1))

    def _weights(self, prepared: PreparedBatch) -> Tensor:
        """Return the weight of each of this rank's slots in the metric, float32 ``[N]``; 0 in a scoring pass."""
        layout, shares = prepared.inputs.layout, prepared.batch.token_shares
        if shares is None:
            shares = torch.zeros(layout.num_tokens)
        # A token counts as the one that it predicts; the first of a sequence is in no response.
        return self._of_this_rank(layout.pack(shares.roll(-1).to(layout.slot_index.device)))

    def _of_this_rank(self, values: Tensor) -> Tensor:
        """Bring ``[R, C, ...]`` to the tokens of this rank's routers, in their order: ``[N, ...]``."""
        slots = values.transpose(0, 1)
        if self._shared_out:
            group = parallel_state.get_tensor_model_parallel_group()
            slots = slots.chunk(group.size())[group.rank()]
        return slots.flatten(0, 1)


class _Chooser(Protocol):
    """What Megatron's ``topk_routing_with_score_function`` asks for each token's experts."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Choose K of E experts by scores ``[N, E]``; return their scores, with gradients, and numbers, ``[N, K]``."""


class _Record:
    """Leaves the choice to the router and records it: int64 ``[N, K]``, None before the first call."""

    experts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts = experts
        return values, experts


class _Replay:
    """Chooses the experts to replay, and counts the tokens for which the router would have chosen others.

    Args:
        target: int64 ``[N, K]``, :data:`_OWN` where the router chooses.
        weights: float32 ``[N]``, the weight of each token in the count.

    Attributes:
        rerouted: Total weight of tokens with other experts than the router's own choice; None before the first call.
    """

    def __init__(self, target: Tensor, weights: Tensor) -> None:
        self._target, self._weights = target, weights
        self.rerouted: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            experts = torch.where(self._target == _OWN, own, self._target)
            differ = (own.sort(-1).values != experts.sort(-1).values).any(-1)
            self.rerouted = (self._weights * differ).sum()  # a recomputation finds the same
        return scores.gather(1, experts), experts


def _routers(chunk: nn.Module) -> list[TopKRouter]:
    """The routers of a chunk's own layers, in order."""
    return [
        module
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
    ]


@contextlib.contextmanager
def _choosing(routers: Sequence[TopKRouter], choosers: Sequence[_Chooser]) -> Iterator[None]:
    """Let each router ask its own object in the ``with`` block."""
    for router, chooser in zip(routers, choosers, strict=True):
        router.router_replay = chooser
    try:
        yield
    finally:
        for router in routers:
            router.router_replay = None


def _unasked() -> EngineError:
    return EngineError(
        "A router did not ask which experts to choose.",
        where="router replay",
        why="the router's layer did not run, or the router chose experts without calling router_replay.get_replay_topk",
        fix="use a version of megatron-core that tests cover (docs/reference/megatron-versions.md), or turn router "
        "replay off",
    )
