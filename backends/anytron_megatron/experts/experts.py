"""What the engine's passes need for a mixture of experts: router replay and weighted auxiliary losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.sequences import scopes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.sequences.scopes import ScopeFactory
    from anytron.workers.engines.rollout_engine import RoutingShape
    from anytron_megatron.experts.load_balancing import LoadBalancing
    from anytron_megatron.experts.router_replay import RouterReplays
    from anytron_megatron.options import RoutingReplay
    from anytron_megatron.training.micro_batch import PreparedBatch
    from anytron_megatron.training.schedule import Feature


class Experts:
    """The mixture-of-experts layers of one model. With a dense model every method does nothing.

    Attributes:
        rollout_routing: Expected shape of the rollout's routing; None = the rollout's routing is not replayed.

    Raises:
        ConfigError: The configured type of load-balancing loss is not supported (see :class:`LoadBalancing`).
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig | None,
        *,
        sequence_format: str,
        replay: RoutingReplay = "off",
    ) -> None:
        self.rollout_routing: RoutingShape | None = None
        self._balancing: LoadBalancing | None = None
        self._replays: RouterReplays | None = None
        if config is None:
            return
        # Not every Megatron that an engine runs on has the parts of a mixture of experts that these need.
        from anytron_megatron.experts.load_balancing import LoadBalancing
        from anytron_megatron.experts.router_replay import RouterReplays

        self._balancing = LoadBalancing(chunks, config, sequence_format)
        if replay != "off":
            self._replays = RouterReplays(chunks, config, from_rollout=replay == "rollout")
            self.rollout_routing = self._replays.shape if self._replays.from_rollout else None

    def score_routing(self) -> Feature:
        """Begin a scoring pass; the returned feature replays the rollout's routing, or records the routers' choices."""
        if self._replays is not None:
            self._replays.start()
        return self._scoring

    def recorded_routing(self, micro_batches: int) -> list[Tensor] | list[None]:
        """Return each micro-batch's routing in the scoring pass that has ended; None for each if none was recorded.

        A collective over pipeline stages.
        """
        if self._replays is None or self._replays.from_rollout:
            return [None] * micro_batches
        return self._replays.recorded()

    def replay_routing(self) -> Feature:
        """Begin an update; in its forward passes, the returned feature replays routing and weights auxiliary losses."""
        if self._balancing is not None:
            self._balancing.start()
        if self._replays is not None:
            self._replays.start()
        return self._replaying

    def unbalanced(self) -> Feature:
        """Begin passes for the gradients of the loss alone: the returned feature replays routing and adds no losses.

        These passes do not change :meth:`metrics`.
        """
        if self._balancing is not None:
            self._balancing.start()
        if self._replays is not None:
            self._replays.start()
        return self._replaying_alone

    def metrics(self) -> dict[str, float]:
        """Return the update's auxiliary losses and, if routing is replayed, how often routers would choose differently.

        The metrics must be summed over data-parallel replicas. A collective over a replica's ranks.
        """
        balance = {} if self._balancing is None else self._balancing.metrics()
        return balance if self._replays is None else {**balance, **self._replays.metrics()}

    def _scoring(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        if self._replays is None:
            return None
        if self._replays.from_rollout:
            return self._replays.replaying(chunk, prepared)
        return self._replays.recording(chunk, prepared)

    def _replaying(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        return scopes.combine(
            None if self._replays is None else self._replays.replaying(chunk, prepared),
            None if self._balancing is None else self._balancing.weighting(prepared),
        )

    def _replaying_alone(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        return scopes.combine(
            None if self._replays is None else self._replays.replaying(chunk, prepared),
            None if self._balancing is None else self._balancing.without(prepared),
        )
