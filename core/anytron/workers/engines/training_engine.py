"""The protocols of training engines, and of the reward models that they offer.

Implementations are found by entry point (:class:`anytron.base.components.EngineInfo`) and live in worker processes; the
loop calls them through an executor. Every engine implements :class:`TrainingEngine`. Each optional ability is a
separate protocol, and a capability that the engine declares: a run that needs an undeclared capability is refused
before any process starts (:mod:`anytron.run.preflight.capabilities`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.record.checkpoint.manifest import FileRecord
    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron.workers.engines.device_memory import MemoryUse
    from anytron.workers.engines.rollout_engine import GenerationRequest, Response, RoutingShape
    from anytron.workers.weights.transfer import Sent, WeightDestination

ScoringRole = Literal["policy", "reference", "teacher"]
UpdatedModel = Literal["policy", "critic"]
Additions = Literal["none", "prediction", "all"]
"""Losses that an engine adds to the given one: ``prediction`` = the loss of multi-token prediction modules, times its
coefficient; ``all`` = all losses that an update adds, such as the load-balancing loss of routers."""
VALUE_HEAD_FILE, VALUE_HEAD = "value_head.safetensors", "value_head.weight"
"""In a critic's directory, beside its trunk: the file of the value head, and the name of its one tensor, float32
``[1, H]`` (H = hidden size)."""


@dataclass(frozen=True)
class Topology:
    """The position of a training rank in the parallel layout.

    Attributes:
        dp_rank: Data-parallel rank: which replica of the model it belongs to. Ranks of one replica get the same
            micro-batches.
        dp_size: Number of data-parallel replicas.
        reports: True on the one rank of each replica whose results are used (last pipeline stage, first
            tensor- and context-parallel rank).
        micro_batch_multiple: The number of micro-batches in a pass must be a multiple of this.
        replays_scoring: Whether updates repeat the routing that scoring of the policy has recorded
            (``TokenOutputs.routing``); the policy must then be scored before every update.
        rollout_routing: Required shape of the rollout's routing (``RaggedBatch.routing``), which updates and scoring of
            the policy repeat; None = they do not repeat it.
    """

    dp_rank: int
    dp_size: int
    reports: bool
    micro_batch_multiple: int = 1
    replays_scoring: bool = False
    rollout_routing: RoutingShape | None = None


@dataclass(frozen=True)
class Conformance:
    """How far a platform's masks and attention kernels are from the definition of attention.

    Attributes:
        difference: Largest difference of a kernel's values and gradients, relative to the largest value or gradient;
            or the number of token pairs that are wrongly attended or hidden, if that is larger.
        tolerance: Largest ``difference`` allowed.
        detail: Description of what was compared.
    """

    difference: float
    tolerance: float
    detail: str


class TrainingEngine(Protocol):
    """One rank of the training engine. All ranks receive the same calls in the same order."""

    def topology(self) -> Topology:
        """Return the position of this rank in the parallel layout."""

    def score(self, micro_batches: Sequence[RaggedBatch], role: ScoringRole = "policy") -> list[TokenOutputs] | None:
        """Compute log-probs and entropies without gradients.

        Args:
            micro_batches: As :meth:`anytron.sequences.batch.RaggedBatch.for_scoring` returns them.
            role: The model that scores.

        Returns:
            One entry per micro-batch on reporting ranks (host tensors), None elsewhere. For the policy the entries
            have their ``routing`` if :attr:`Topology.replays_scoring` is True.
        """

    def update(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update.

        Args:
            micro_batches: Micro-batches of this rank; every data-parallel replica gets equally many.
            loss: Loss function, called with each micro-batch.

        Returns:
            On reporting ranks: metrics of this rank's micro-batches (sums over their tokens, to be added
            over replicas), and ``grad_norm``, ``lr``, ``update/skipped`` (the same everywhere). None elsewhere.
            If the loss or a gradient is NaN or infinite on any rank, no rank changes any state (weights,
            optimizer, schedule, routing biases), and ``update/skipped`` is 1; otherwise it is 0.
        """

    def export_weights(self, destination: WeightDestination[Sent]) -> Sent | None:
        """Send the policy's weights under their Hugging Face names; rank 0 returns the destination's result.

        A rollout engine may be loading them at the same time (:class:`anytron.workers.weights.stream.WeightStream`).
        """

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face model directory (without tokenizer and processor)."""

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run's records: ``device``, ``patches`` of this process, and ``kernels``.

        ``kernels`` is the result of :meth:`anytron.device.hooks.facade.Hooks.suppliers`, and the optional
        ``kernel_descriptions`` is the result of ``Hooks.kernel_descriptions``. The optional ``peak_flops`` is the
        result of :meth:`anytron.device.platform.Platform.peak_flops` as a mapping; without it there is no metric
        ``throughput/mfu``.
        """

    def close(self) -> None:
        """Release the engine's resources; another engine may be built in this process afterwards."""


class CriticEngine(TrainingEngine, Protocol):
    """A training engine that also trains the critic of PPO: capability ``critic``. Used only in runs with a critic."""

    def values(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Compute the critic's values, without gradients.

        Returns:
            float32 ``[T]`` for each micro-batch on reporting ranks (host tensors), None elsewhere. Entry t is the
            value of the state before token t; it is 0 for the first token of a sequence.
        """

    def update_critic(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update of the critic. Arguments and results as in :meth:`TrainingEngine.update`."""

    def save_critic(self, path: str) -> None:
        """Write the critic's trunk, as a Hugging Face model, and its value head to a directory for ``critic.path``.

        The head is :data:`VALUE_HEAD` in the file :data:`VALUE_HEAD_FILE`.
        """


class AdapterEngine(TrainingEngine, Protocol):
    """A training engine that trains adapters: capability ``adapters``. Used only in runs with ``model.lora``."""

    def save_adapter(self, path: str) -> None:
        """Write the adapters of ``model.lora``, in PEFT's format."""

    def export_adapter(self, destination: WeightDestination[Sent]) -> Sent | None:
        """Send the adapters under PEFT's names, as :meth:`TrainingEngine.export_weights` sends weights."""


class CheckpointEngine(TrainingEngine, Protocol):
    """A training engine that can be stopped and continued: capability ``checkpoints``.

    A checkpoint holds the state on which the next steps depend: weights, optimizers, schedules, update counters and
    random states, of the policy and of the critic. The driver begins no save before the previous one is over, unless
    the directory of that save was lost.
    """

    def save_checkpoint(self, path: str, *, asynchronous: bool) -> None:
        """Begin to write the engine's state. A collective.

        If the driver has not asked for the files of the previous save, that save is discarded, even if it has failed.
        The call may wait until the writing of that save ends.

        Args:
            path: An existing, empty directory that every rank can write to.
            asynchronous: Whether to return as soon as the state is copied, and write files while training goes on. In
                both cases the files hold the state at the time of this call.

        Raises:
            EngineError: The directory does not exist, because the run has started again without this rank.
        """

    def written_files(self, *, wait: bool) -> Mapping[str, FileRecord] | None:
        """Ask for the files of the last :meth:`save_checkpoint`. A collective.

        Args:
            wait: Whether to wait until every rank has written its files.

        Returns:
            This rank's files, by path relative to the checkpoint, once the files of every rank are on disk, synced
            and hashed; None while they are still being written.

        Raises:
            EngineError: Writing failed on a rank, for example because its disk is full, or the directory is gone.
        """

    def load_checkpoint(self, path: str) -> None:
        """Restore the state that :meth:`save_checkpoint` has written. A collective.

        Any parallel layout may have written it; in the same layout the restored state is equal bit for bit.

        Raises:
            EngineError: The checkpoint belongs to another model, is damaged, or would run code.
        """


class OffloadingEngine(TrainingEngine, Protocol):
    """A training engine that can free its device for a rollout engine.

    It declares the capability ``offload``, which the setting ``engine.offload`` requires.
    """

    def offload(self) -> MemoryUse:
        """Move the parts that ``engine.offload`` names from the device to the host. A collective.

        ``export_weights`` works while they are offloaded. Any other call that needs them first brings them back, bit
        for bit, except gradients: they come back as zeros, because no update needs the previous update's gradients.
        """


class GeneratingEngine(TrainingEngine, Protocol):
    """A training engine that generates with the weights that it trains (``EngineInfo.part_of`` of a rollout engine).

    For the driver, its ranks together are one :class:`~anytron.workers.engines.rollout_engine.RolloutEngine` without
    weights to load. Generation has no effect on training.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, the same on all ranks; data-parallel replicas divide them among themselves."""

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate, as a rollout engine's ``poll`` does; each reporting rank returns the responses of its replica."""

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Cancel requests, as a rollout engine's ``abort`` does; only one of the ranks returns the responses so far."""

    def weights_version(self) -> int:
        """Return the version of the current weights: the number of completed optimizer updates."""


class ObservableEngine(TrainingEngine, Protocol):
    """A training engine whose logits can be compared with those of other engines: capability ``observation``.

    ``anytron verify`` needs it; training does not.
    """

    def logits(self, micro_batch: RaggedBatch) -> Tensor | None:
        """Compute the policy's logits over the whole vocabulary, without gradients, to compare them.

        For small micro-batches only: these logits need much memory, and training never makes them.

        Args:
            micro_batch: The micro-batch, the same on every rank.

        Returns:
            float32 ``[T, V]`` on reporting ranks (a host tensor), None elsewhere. Row t holds the logits
            *after* token t, not divided by the temperature; V is the real vocabulary.
        """

    def attention_conformance(self) -> Conformance | None:
        """Compare the platform's masks and attention kernels for this model with their definition, in float64.

        Returns:
            The results on this rank; None if the engine has nothing to check.
        """


class DifferentiableEngine(TrainingEngine, Protocol):
    """A training engine whose gradients can be compared with those of other engines: capability ``gradients``.

    ``anytron verify`` compares them with Hugging Face's; training does not need it.
    """

    def export_gradients(
        self,
        micro_batches: Sequence[RaggedBatch],
        loss: LossFunction,
        destination: WeightDestination[Sent],
        model: UpdatedModel = "policy",
        additions: Additions = "none",
    ) -> Sent | None:
        """Do the passes of an update, and send the gradient of each parameter of a model. Nothing is updated.

        Args:
            micro_batches: As in :meth:`TrainingEngine.update`.
            loss: The loss. Losses of the engine itself are added only as ``additions`` says.
            destination: Receives float32 tensors under the names of :meth:`TrainingEngine.export_weights`; with
                ``model.lora`` the adapters' gradients, under the names of :meth:`AdapterEngine.export_adapter`.
                Parameters that the run does not train are left out.
            model: The model whose gradients are sent. The gradient of the critic's head is sent under
                :data:`VALUE_HEAD`.
            additions: Which of its own losses the engine adds, such as the load-balancing loss of experts.

        Returns:
            The destination's result, from rank 0.
        """


class InspectableEngine(TrainingEngine, Protocol):
    """A training engine that can locate the first non-finite number: capability ``inspection``.

    ``anytron replay`` needs it; training does not.
    """

    def inspect_update(
        self, micro_batches: Sequence[RaggedBatch], loss: LossFunction, model: UpdatedModel
    ) -> Inspection:
        """Do the passes of an update, forward and backward, and check every number. Nothing is updated.

        For an engine of one rank. Arguments as in :meth:`TrainingEngine.update`.
        """


@dataclass(frozen=True)
class NonFinite:
    """The first number that is NaN or infinite in a pass over a model.

    Attributes:
        place: Module or parameter, by its dotted name; or ``loss``.
        what: The kind of tensor: an output, the loss, or a gradient.
        value: ``nan``, ``inf`` or ``-inf``.
        count: How many numbers of the same tensor are not finite.
        size: How many numbers the tensor has.
        micro_batch: Number of the micro-batch, from 0.
        sequence: Position of the sequence in the micro-batch; None if the tensor has no entry for each token.
        token: Position of the token in its sequence; None if ``sequence`` is None.
    """

    place: str
    what: Literal["output", "loss", "gradient of its input", "gradient of its output", "gradient"]
    value: str
    count: int
    size: int
    micro_batch: int
    sequence: int | None = None
    token: int | None = None


@dataclass(frozen=True)
class Inspection:
    """The result of :meth:`InspectableEngine.inspect_update`.

    Attributes:
        weights: Names of parameters that have non-finite numbers before the pass.
        first: The first non-finite number in the pass; None if all are finite.
        metrics: The update's metrics.
    """

    weights: tuple[str, ...]
    first: NonFinite | None
    metrics: Mapping[str, float]


class RewardModelEngine(Protocol):
    """One rank of a reward model. All ranks receive the same calls in the same order.

    The class is named in ``EngineInfo.reward_model``, and is built from the configuration
    :attr:`anytron.config.schema.RunConfig.of_reward_model`.
    """

    def topology(self) -> Topology:
        """Return the position of this rank in the reward model's parallel layout."""

    def score(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Score sequences, as ``AutoModelForSequenceClassification`` of transformers does.

        The score is the head's output at the last token that is not the padding token of the model's config.

        Returns:
            For each micro-batch float32 ``[B]`` on reporting ranks (host tensors), None elsewhere.
        """

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run's records, as :meth:`TrainingEngine.describe` does."""

    def close(self) -> None:
        """Release the engine's resources; another engine may be built in this process afterwards."""
