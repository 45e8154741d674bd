"""The training worker's side of the rollout, which sends weights to the server of its replica."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray
from verl.workers.rollout.base import BaseRollout

from anytron import EngineError
from anytron_verl.rollout.server import server_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The connection of one training worker to the server of its replica; by default rank R uses replica R."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._replica = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server does not release memory."""

    async def release(self) -> None:
        """Do nothing, as :meth:`resume`."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send all weights to the server, in buckets of ``checkpoint_engine.update_weights_bucket_megabytes``.

        Args:
            weights: The weights; iterating is a collective of all training workers, so each worker must read all.
            global_steps: verl's count of updates.
            wire_format: verl's format name, which must be that of whole tensors.
            peft_config: Must be None, because adapters are merged.

        Raises:
            EngineError: The weights are not whole tensors of the whole model, or the server could not load them.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise EngineError(
                "verl's rollout 'transformers' accepts full weights only.",
                where="update_weights",
                why="it received adapters" if peft_config is not None else f"it received {wire_format}",
                fix="set actor_rollout_ref.model.lora.merge=True"
                if peft_config is not None
                else "set actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
            )
        if self._server is None:
            self._server = ray.get_actor(server_name(self._replica))
        room = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: list[tuple[str, Tensor]] = []
        filled = 0
        for name, tensor in weights:
            if bucket and filled + tensor.nbytes > room:
                await self._server.load_weights.remote(bucket, last=False, global_steps=global_steps)
                bucket, filled = [], 0
            filled += tensor.nbytes
            # A copy: what is a view of a larger tensor would travel with the whole of it.
            bucket.append((name, tensor.detach().cpu().clone()))
        await self._server.load_weights.remote(bucket, last=True, global_steps=global_steps)
