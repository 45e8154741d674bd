"""The training ranks as the loop uses them, with whole batches in and out; and the start of all engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypeVarTuple

from anytron.algorithms.importance import with_moments_resolved
from anytron.base.errors import EngineError
from anytron.base.metric import joined, largest
from anytron.run.groups import reward_model_group, training_group
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.rollout.pool import RolloutPool
from anytron.run.rollout.turns import AttendedGroup
from anytron.run.trainer.reward_model import RewardModelRanks
from anytron.run.trainer.updates import shared
from anytron.sequences.batch import RaggedBatch, TokenOutputs
from anytron.workers.engines.training_engine import (
    AdapterEngine,
    CheckpointEngine,
    CriticEngine,
    DifferentiableEngine,
    GeneratingEngine,
    ObservableEngine,
    OffloadingEngine,
    TrainingEngine,
)
from anytron.workers.executor.observer import RankObserver
from anytron.workers.executor.protocol import call, scatter
from anytron.workers.weights.transfer import WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from anytron.algorithms.contract import LossFunction
    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.manifest import FileRecord
    from anytron.run.rollout.turns import Turns
    from anytron.run.trainer.interruptions import Restarts
    from anytron.run.trainer.updates import MicroBatch, MiniBatch, UpdatePlan
    from anytron.workers.engines.training_engine import Additions, Conformance, ScoringRole, Topology, UpdatedModel
    from anytron.workers.executor.protocol import Executor, WorkerGroup
    from anytron.workers.weights.transfer import WeightManifest, WeightPart


Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")

RANK_VALUES = ("grad_norm", "lr", "update/skipped")
"""Metrics of an update that are the same on every rank; other metrics are partial, and are combined over replicas."""


@dataclass(frozen=True)
class TrainingWorkers:
    """All ranks of the training engine.

    Attributes:
        group: The worker processes.
        topology: Position of each rank in the parallel layout, in rank order.
    """

    group: WorkerGroup
    topology: tuple[Topology, ...]

    @classmethod
    def of(cls, group: WorkerGroup) -> TrainingWorkers:
        """Wait until the ranks are ready, and ask for their positions in the parallel layout."""
        return cls(group, tuple(call(group, TrainingEngine.topology)))

    def while_generating(self, turns: Turns) -> TrainingWorkers:
        """Return an object for the same ranks that lets ``turns`` generate while it waits for the ranks."""
        return replace(self, group=AttendedGroup(self.group, turns))

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.topology[0].dp_size

    def with_scores(
        self, batch: RaggedBatch, updates: UpdatePlan, *, reference: bool, teacher: bool = False
    ) -> RaggedBatch:
        """Add the log-probs of the old policy if updates need them, and of the reference and the teacher if asked for.

        With the old policy's log-probs, its routing is added if the engine records it.

        Raises:
            EngineError: The engine returned a wrong number of rows for a micro-batch.
        """
        if updates.needs_old_log_probs:
            log_probs, routing = self._scores(batch, updates, "policy", "log_probs", "routing")
            batch = batch.scored(TokenOutputs(log_probs=log_probs, routing=routing))
        if reference:
            batch = replace(batch, reference_log_probs=self.score(batch, updates, "reference"))
        if teacher:
            batch = replace(batch, teacher_log_probs=self.score(batch, updates, "teacher"))
        return batch

    def with_values(self, batch: RaggedBatch, updates: UpdatePlan) -> RaggedBatch:
        """Add the critic's value of each state.

        Raises:
            EngineError: The engine returned a wrong number of rows for a micro-batch.
        """
        per_rank = updates.micro_batches(batch.for_scoring(), self.dp_size)
        results = self._scatter(CriticEngine.values, per_rank)
        return replace(batch, values=_joined(batch, per_rank, results))

    def score(self, batch: RaggedBatch, updates: UpdatePlan, role: ScoringRole) -> Tensor:
        """Compute log-probs, float32 ``[T]``, without gradients.

        Raises:
            EngineError: The engine returned a wrong number of rows for a micro-batch.
        """
        (log_probs,) = self._scores(batch, updates, role, "log_probs")
        assert log_probs is not None, "every engine computes log-probs"
        return log_probs

    def token_outputs(self, batch: RaggedBatch, updates: UpdatePlan, role: ScoringRole) -> TokenOutputs:
        """Compute log-probs, entropies and, if the engine records it, the routing, without gradients.

        Raises:
            EngineError: The engine returned a wrong number of rows for a micro-batch.
        """
        log_probs, entropy, routing = self._scores(batch, updates, role, "log_probs", "entropy", "routing")
        return TokenOutputs(log_probs=log_probs, entropy=entropy, routing=routing)

    def logits(self, batch: RaggedBatch) -> Tensor:
        """Compute whole logits, float32 ``[T, V]``; row t predicts the token after t. Use it for small batches only."""
        found = zip(self.topology, call(self.group, ObservableEngine.logits, batch), strict=True)
        return next(logits for place, logits in found if logits is not None and place.reports and place.dp_rank == 0)

    def attention_conformance(self) -> Conformance | None:
        """Return the results of the rank whose attention differs most from its definition; None if no rank has any."""
        found = call(self.group, ObservableEngine.attention_conformance)
        return max((one for one in found if one is not None), key=lambda one: one.difference, default=None)

    def update(self, mini_batch: RaggedBatch | MiniBatch, updates: UpdatePlan, loss: LossFunction) -> dict[str, float]:
        """Do one optimizer update; return its metrics over the whole mini-batch."""
        return with_moments_resolved(self._update(TrainingEngine.update, mini_batch, updates, loss))

    def update_critic(
        self, mini_batch: RaggedBatch | MiniBatch, updates: UpdatePlan, loss: LossFunction
    ) -> dict[str, float]:
        """Do one optimizer update of the critic; return its metrics, whose names begin with ``critic/``."""
        metrics = self._update(CriticEngine.update_critic, mini_batch, updates, loss)
        return {name if name not in RANK_VALUES else f"critic/{name}": value for name, value in metrics.items()}

    def export_weights(self, path: str, part: WeightPart = "weights") -> WeightManifest:
        """Write the policy's weights, or its adapters alone, to a safetensors file."""
        if part == "adapter":
            return _first(call(self.group, AdapterEngine.export_adapter, WeightFile(path)))
        return _first(call(self.group, TrainingEngine.export_weights, WeightFile(path)))

    def export_gradients(
        self,
        path: str,
        mini_batch: RaggedBatch | MiniBatch,
        updates: UpdatePlan,
        loss: LossFunction,
        *,
        model: UpdatedModel = "policy",
        additions: Additions = "none",
    ) -> WeightManifest:
        """Write the gradients of a mini-batch's loss to a safetensors file, float32; nothing is updated.

        The gradients are of the given loss plus the engine's own losses that ``additions`` selects.
        """
        shares = shared(updates.micro_batches(mini_batch, self.dp_size), self.topology)
        file = WeightFile(path)
        arguments = ((ranks, (batches, loss, file, model, additions)) for ranks, batches in shares)
        return _first(scatter(self.group, DifferentiableEngine.export_gradients, arguments))

    def offload(self) -> dict[str, float]:
        """Move the parts that ``engine.offload`` names to the host; return metrics of the ranks' memory."""
        found = call(self.group, OffloadingEngine.offload)
        return {
            **largest("memory/training_peak_bytes", [one.peak for one in found]),
            "memory/offloaded_bytes": sum(one.released for one in found),
        }

    def peak_memory(self) -> dict[str, float]:
        """Return the peak device memory of the busiest rank since the last call, unless torch cannot tell."""
        return largest("memory/training_peak_bytes", call(self.group, RankObserver.peak_memory))

    def begin_traces(self, ranks: Sequence[int], *, stacks: bool, memory: bool) -> None:
        """Begin to record traces on some ranks: ``stacks`` adds Python lines, ``memory`` allocations."""
        arguments = [((rank,), (rank in ranks, stacks, memory)) for rank in range(self.group.size)]
        scatter(self.group, RankObserver.begin_trace, arguments)

    def end_traces(self, paths: Mapping[int, str], largest: int) -> list[str | None]:
        """Write traces of at most ``largest`` bytes to ``paths``, by rank; return for each rank why it has no file.

        The reason is None if the rank has a file, or was not recorded.
        """
        arguments = [((rank,), (paths.get(rank, ""), largest)) for rank in range(self.group.size)]
        return scatter(self.group, RankObserver.end_trace, arguments)

    def weights_version(self) -> int:
        """Return the version of the weights that the ranks would generate with, if they generate."""
        return call(self.group, GeneratingEngine.weights_version)[0]

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face model directory, without tokenizer and processor."""
        call(self.group, TrainingEngine.save_hf, path)

    def save_adapter(self, path: str) -> None:
        """Write the adapters of ``model.lora`` in PEFT's format."""
        call(self.group, AdapterEngine.save_adapter, path)

    def save_critic(self, path: str) -> None:
        """Write the critic to a directory that ``critic.path`` can name."""
        call(self.group, CriticEngine.save_critic, path)

    def save_checkpoint(self, path: str, *, asynchronous: bool) -> None:
        """Begin to write the engine's state into a directory."""
        call(self.group, CheckpointEngine.save_checkpoint, path, asynchronous=asynchronous)

    def written_files(self, *, wait: bool) -> dict[str, FileRecord] | None:
        """Return the files that all ranks wrote in the last save; None while they are still being written."""
        found = call(self.group, CheckpointEngine.written_files, wait=wait)
        ranks = [files for files in found if files is not None]
        return {name: record for files in ranks for name, record in files.items()} if len(ranks) == len(found) else None

    def load_checkpoint(self, path: str) -> None:
        """Restore the state that :meth:`save_checkpoint` has written."""
        call(self.group, CheckpointEngine.load_checkpoint, path)

    def describe(self) -> list[Mapping[str, Any]]:
        """Return facts about each rank, for the run's records."""
        return call(self.group, TrainingEngine.describe)

    def _scores(self, batch: RaggedBatch, updates: UpdatePlan, role: ScoringRole, *names: str) -> list[Tensor | None]:
        """Score a batch; return only the named fields of :class:`TokenOutputs`, because fields are large."""
        per_rank = updates.micro_batches(batch.for_scoring(), self.dp_size)
        results = self._scatter(TrainingEngine.score, per_rank, role)
        parts = [[[getattr(outputs, name) for outputs in share] for share in results] for name in names]
        return [None if one[0][0] is None else _joined(batch, per_rank, one) for one in parts]

    def _update(
        self,
        method: Callable[[Any, Sequence[RaggedBatch], LossFunction], Mapping[str, float] | None],
        mini_batch: RaggedBatch | MiniBatch,
        updates: UpdatePlan,
        loss: LossFunction,
    ) -> dict[str, float]:
        results = self._scatter(method, updates.micro_batches(mini_batch, self.dp_size), loss)
        metrics = {name: joined(name, (result[name] for result in results)) for name in results[0]}
        return metrics | {name: results[0][name] for name in RANK_VALUES}

    def _scatter(
        self,
        method: Callable[[Any, Sequence[RaggedBatch], Unpack[Arguments]], Answer | None],
        per_rank: list[list[MicroBatch]],
        *arguments: Unpack[Arguments],
    ) -> list[Answer]:
        """Send each replica its micro-batches; return the results of the reporting ranks, replica by replica."""
        shares = ((ranks, (batches, *arguments)) for ranks, batches in shared(per_rank, self.topology))
        results = scatter(self.group, method, shares)
        reported = {
            place.dp_rank: result
            for place, result in zip(self.topology, results, strict=True)
            if place.reports and result is not None
        }
        return [reported[rank] for rank in range(self.dp_size)]


def _first(answers: Sequence[Answer | None]) -> Answer:
    """Return the answer of rank 0, which alone has one."""
    answer = answers[0]
    assert answer is not None, "rank 0 answers"
    return answer


def _joined(batch: RaggedBatch, per_rank: list[list[MicroBatch]], results: list[list[Tensor]]) -> Tensor:
    """Bring per-token results, ``[dp_size][micro-batches]`` of ``[T', ...]``, to the batch's tokens: ``[T, ...]``.

    Results of fillers are left out: the sequences of fillers are in other micro-batches too.
    """
    whole = torch.zeros(batch.num_tokens, *results[0][0].shape[1:], dtype=results[0][0].dtype)
    lengths = batch.lengths.tolist()
    places = whole.numpy()
    starts = list(accumulate(lengths, initial=0))
    for micro_batches, found in zip(per_rank, results, strict=True):
        for micro_batch, values in zip(micro_batches, found, strict=True):
            if not micro_batch.is_filler:
                begin, rows = 0, values.numpy()
                if len(rows) != (tokens := sum(lengths[sequence] for sequence in micro_batch.sequences)):
                    raise EngineError(
                        "An engine returned results of the wrong length.",
                        why=f"it gave {len(rows)} rows for a micro-batch of {tokens} tokens",
                        fix="return one row for each token of the micro-batch, in its order, without padding",
                    )
                for sequence in micro_batch.sequences:
                    end = begin + lengths[sequence]
                    places[starts[sequence] : starts[sequence + 1]] = rows[begin:end]
                    begin = end
    return whole


def kernel_suppliers(facts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return plugins by kernel, from :meth:`TrainingWorkers.describe`: each kernel that any rank requested.

    If several plugins supplied a kernel on a rank, the text names all of them, separated by commas; if ranks disagree,
    the last one counts. Only the last pipeline stage computes log-probs. The result is empty for an engine that takes
    no kernel from a plugin.
    """
    return {kernel: plugins for rank in facts for kernel, plugins in sorted(rank.get("kernels", {}).items())}


def start_training(executor: Executor, config: RunConfig) -> TrainingWorkers:
    """Start the training engine and wait for it."""
    return TrainingWorkers.of(executor.start(training_group(config)))


class Workers(NamedTuple):
    """All engines of a run.

    Attributes:
        trainer: The training ranks.
        rollout: The rollout engines.
        reward_model: The ranks of the reward model; None without one.
    """

    trainer: TrainingWorkers
    rollout: RolloutPool
    reward_model: RewardModelRanks | None


def start_workers(executor: Executor, config: RunConfig, restarts: Restarts | None = None) -> Workers:
    """Start the engines at the same time, and wait for those that train and score, but not for rollout.

    Args:
        executor: Starts the processes.
        config: The run's configuration.
        restarts: Counter of lost rollout processes, each of which is replaced; None = the first lost one is an error.
    """
    training = executor.start(training_group(config))
    scoring = None if config.reward_model is None else executor.start(reward_model_group(config))
    if generates_in_training(config):
        trainer = TrainingWorkers.of(training)
        at_one_time = config.rollout.max_batch_size * trainer.dp_size
        settings = config.rollout.model_copy(update={"max_batch_size": at_one_time})
        rollout = RolloutPool(executor, settings, lost=None, within=training)
    else:
        rollout = RolloutPool(executor, config.rollout, None if restarts is None else restarts.lost)
        trainer = TrainingWorkers.of(training)
        rollout.routing = trainer.topology[0].rollout_routing
    return Workers(trainer, rollout, None if scoring is None else RewardModelRanks.of(scoring, config))
