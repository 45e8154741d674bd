"""What a mixture of experts adds to the engine's passes: router replay and weighted auxiliary losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.sequences import scopes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.experts.load_balancing import LoadBalancing
    from anytron_megatron.experts.router_replay import RouterReplays
    from anytron_megatron.training.micro_batch import PreparedBatch
    from anytron_megatron.training.schedule import Feature


class Experts:
    """The mixture-of-experts layers of one model. With a dense model every method does nothing.

    Raises:
        ConfigError: The auxiliary loss would not be what its name says.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig | None,
        *,
        sequence_format: str,
        router_replay: bool,
    ) -> None:
        self._balancing: LoadBalancing | None = None
        self._replays: RouterReplays | None = None
        if config is None:
            return
        # Not every Megatron that an engine runs on has the parts of a mixture of experts that these need.
        from anytron_megatron.experts.load_balancing import LoadBalancing
        from anytron_megatron.experts.router_replay import RouterReplays

        self._balancing = LoadBalancing(chunks, config, sequence_format)
        self._replays = RouterReplays(chunks, config) if router_replay else None

    def record_routing(self) -> Feature:
        """Begin a scoring pass; in the scope of its forward passes routing is recorded."""
        if self._replays is not None:
            self._replays.start_recording()
        return self._recording

    def recorded_routing(self, micro_batches: int) -> list[Tensor] | list[None]:
        """Give each micro-batch's routing in the scoring pass that has ended. A collective over pipeline stages."""
        return [None] * micro_batches if self._replays is None else self._replays.recorded()

    def replay_routing(self) -> Feature:
        """Begin an update; in the scope of its forward passes routing is replayed and auxiliary losses weighted."""
        if self._balancing is not None:
            self._balancing.start()
        return self._replaying

    def metrics(self) -> dict[str, float]:
        """Report the update's auxiliary losses, to be added over replicas. A collective over a replica's ranks."""
        return {} if self._balancing is None else self._balancing.metrics()

    def _recording(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        return None if self._replays is None else self._replays.recording(chunk, prepared)

    def _replaying(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        return scopes.combine(
            None if self._replays is None else self._replays.replaying(chunk, prepared),
            None if self._balancing is None else self._balancing.weighting(prepared),
        )
