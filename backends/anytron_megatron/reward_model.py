"""The ranks of a reward model: a classifier of sequences that is never trained."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytron.device.patches import Phase
from anytron.workers.engines.device_memory import Parked
from anytron_megatron.building import ModelBuilder, join_ranks, prepare_platform, rank_facts
from anytron_megatron.models.bridge import BridgeSource
from anytron_megatron.options import MegatronOptions
from anytron_megatron.training import parallel
from anytron_megatron.training.memory import release_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.context import EngineContext
    from anytron.workers.engines.training_engine import Topology


class MegatronRewardModel:
    """One rank of a reward model; it implements :class:`anytron.workers.engines.training_engine.RewardModelEngine`.

    A reward model has its own process groups and parallel sizes. Megatron supports only one layout in a process
    (``megatron.core.parallel_state``), so that the policy's ranks cannot hold the reward model.

    Args:
        context: Configuration (:attr:`anytron.config.schema.RunConfig.of_reward_model`), hooks, platform, ledger, rank.

    Raises:
        EngineError: The weights do not match the model.
    """

    def __init__(self, context: EngineContext) -> None:
        config = context.config
        assert config.reward_model is not None
        assert config.model.path is not None
        self._context, sizes = context, config.parallel.sizes()
        prepare_platform(context, sizes)
        self._runtime = join_ranks(context, sizes)
        self._source = BridgeSource(
            Path(config.model.path),
            dtype=getattr(torch, config.model.dtype),
            sizes=sizes,
            recompute="none",
            deterministic=config.engine.deterministic,
            scores=True,
            portable=context.stack.platform.portable_modules,
            transformer=MegatronOptions.of(config).transformer,
        )
        builder = ModelBuilder(context, sizes, self._runtime)
        self._preparer = builder.preparer(self._source)
        self._model = builder.reward_model(self._source, self._preparer)
        context.stack.apply_phase(Phase.AFTER_BUILD)
        self._offloads = config.reward_model.offload
        self._parked: Parked | None = None
        self._leave_device()

    def topology(self) -> Topology:
        """Return the position of this rank in the parallel layout."""
        return parallel.topology()

    def score(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Return each micro-batch's scores of sequences, float32 ``[B]``; None if ``Topology.reports`` is False."""
        if self._parked is not None:
            self._parked.take_back()
        outputs = self._model.score(micro_batches)
        self._leave_device()
        return None if outputs is None else [one.scores for one in outputs if one.scores is not None]

    def describe(self) -> Mapping[str, Any]:
        """Describe this rank for the run's records."""
        facts = rank_facts(self._context, self._runtime, self._preparer.mask_kind)
        return facts if self._parked is None else {**facts, "offloaded_bytes": self._parked.num_bytes}

    def close(self) -> None:
        """Leave the process groups; another engine may be built in this process afterwards."""
        self._source.close()
        release_memory(self._model.modules)
        parallel.destroy()
        self._runtime.empty_cache()

    def _leave_device(self) -> None:
        if self._offloads:
            self._runtime.synchronize()
            weights = chain.from_iterable((*one.parameters(), *one.buffers()) for one in self._model.modules)
            self._parked = Parked(weights, pin=self._runtime.can_pin_memory())
            self._runtime.empty_cache()
