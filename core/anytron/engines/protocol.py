"""The protocols that the loop is written against: training engine, rollout engine.

Implementations are found by entry point (:class:`anytron.components.EngineInfo`) and live in worker processes; the loop
calls them through an executor. :class:`TrainingEngine` and :class:`RolloutEngine` are what every engine needs. What
some can do besides is a protocol of its own, and a capability that the engine declares: a run that needs one that is
not declared is refused before any process starts (:mod:`anytron.preflight.capabilities`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.batch import RaggedBatch, TokenOutputs
    from anytron.checkpoint.manifest import FileRecord
    from anytron.config.schema import RunConfig
    from anytron.data.images import ImagePatches
    from anytron.engines.inspection import Inspection
    from anytron.engines.routing import RoutingShape
    from anytron.engines.weights import Sent, WeightDestination, WeightOrigin
    from anytron.hooks.facade import Hooks
    from anytron.hooks.types import ProcessInfo
    from anytron.patches import Ledger
    from anytron.platform import Platform

TrainedRole = Literal["policy", "reference"]
UpdatedModel = Literal["policy", "critic"]
StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class EngineContext:
    """What every engine is constructed with, in its worker process, after the bootstrap.

    Attributes:
        config: The run's configuration.
        hooks: The facade over all plugins.
        platform: The active platform.
        ledger: The patches of this process; ``before_import`` has been applied.
        process: Role and rank of this process.
        init_method: Where the ranks of the group meet, for ``torch.distributed.init_process_group``: the executor's
            choice. Ranks on one machine meet in a file that is theirs alone; nothing listens.
    """

    config: RunConfig
    hooks: Hooks
    platform: Platform
    ledger: Ledger
    process: ProcessInfo
    init_method: str = "env://"


@dataclass(frozen=True)
class Topology:
    """Where a training rank stands.

    Attributes:
        dp_rank: Data-parallel rank: which replica of the model it belongs to. Ranks of one replica get the same
            micro-batches.
        dp_size: Data-parallel replicas.
        reports: True on the one rank of each replica whose results count (last pipeline stage, first
            tensor- and context-parallel rank).
        micro_batch_multiple: The engine takes a multiple of this many micro-batches in a pass.
        replays_scoring: Updates repeat what a pass that scored the policy has recorded (``TokenOutputs.routing``), so
            that such a pass comes before every update.
        rollout_routing: What the routing of the rollout must look like, which passes that score the policy and updates
            repeat (``RaggedBatch.routing``); None = they repeat none.
    """

    dp_rank: int
    dp_size: int
    reports: bool
    micro_batch_multiple: int = 1
    replays_scoring: bool = False
    rollout_routing: RoutingShape | None = None


@dataclass(frozen=True)
class Conformance:
    """How far a platform's answers are from the definition.

    Attributes:
        difference: The largest: of a kernel's values and gradients, or 1 for each pair of tokens that a mask
            lets through or hides wrongly.
        tolerance: What it may be.
        detail: What was compared.
    """

    difference: float
    tolerance: float
    detail: str


class TrainingEngine(Protocol):
    """One rank of the training engine. All ranks receive the same calls in the same order."""

    def topology(self) -> Topology:
        """Where this rank stands."""

    def score(self, micro_batches: Sequence[RaggedBatch], role: TrainedRole = "policy") -> list[TokenOutputs] | None:
        """Compute log-probs and entropies without gradients.

        Returns:
            One entry per micro-batch on reporting ranks (host tensors), None elsewhere. The policy's
            have their ``routing`` if :attr:`Topology.replays_scoring`.
        """

    def update(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update.

        Args:
            micro_batches: Those of this rank; every data-parallel replica gets equally many.
            loss: Computes each micro-batch's part of the loss.

        Returns:
            On reporting ranks: metrics of this rank's micro-batches (sums over their tokens, to be added
            over replicas), and ``grad_norm``, ``lr``, ``update/skipped`` (the same everywhere). None elsewhere.
            Where the loss or a gradient is NaN or infinite on any rank, no rank changes anything - weights,
            optimizer, schedule, routing biases - and ``update/skipped`` is 1; otherwise it is 0.
        """

    def export_weights(self, destination: WeightDestination[Sent]) -> Sent | None:
        """Send the policy's weights under their Hugging Face names; rank 0 returns what the destination does.

        A rollout engine may be loading them at the same time (:class:`anytron.engines.weight_stream.WeightStream`).
        """

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face model directory (without tokenizer and processor)."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for the run's records: ``device``, ``patches`` of this process, and ``kernels`` by supplier.

        ``kernels`` is what :meth:`anytron.hooks.facade.Hooks.suppliers` returns.
        """

    def close(self) -> None:
        """Release what the engine holds; another may be built in this process afterwards."""


class CriticEngine(TrainingEngine, Protocol):
    """A training engine that trains the critic of PPO too: capability ``critic``; called with ``critic`` only."""

    def values(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Ask the critic for its values, without gradients.

        Returns:
            float32 ``[T]`` for each micro-batch on reporting ranks (host tensors), None elsewhere. Entry t is the
            value of the state before token t, as a log-prob is that of drawing it there; 0 for first tokens.
        """

    def update_critic(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update of the critic. Arguments and results as in :meth:`TrainingEngine.update`."""

    def save_critic(self, path: str) -> None:
        """Write the critic, so that ``critic.path`` can name the directory."""


class AdapterEngine(TrainingEngine, Protocol):
    """A training engine that trains adapters: capability ``adapters``; called with ``model.lora`` only."""

    def save_adapter(self, path: str) -> None:
        """Write the adapters of ``model.lora``, in PEFT's format."""


class CheckpointEngine(TrainingEngine, Protocol):
    """A training engine that can be stopped and continued: capability ``checkpoints``.

    A checkpoint holds what the next steps depend on: weights, optimizers, schedules, update counters and random
    states, of the policy and of the critic. The driver begins no save before the last one is over.
    """

    def save_checkpoint(self, path: str, *, asynchronous: bool) -> None:
        """Begin to write the engine's state. A collective.

        Args:
            path: An existing, empty directory that every rank can write to.
            asynchronous: Return as soon as the state is copied; files are written while training goes on. They hold
                the state at the time of this call either way.
        """

    def written_files(self, *, wait: bool) -> Mapping[str, FileRecord] | None:
        """Ask for the files of the last :meth:`save_checkpoint`. A collective.

        Args:
            wait: Return when every rank has written its files.

        Returns:
            This rank's files, by path relative to the checkpoint's, once those of every rank are on disk, synced and
            hashed; None while they are still being written.

        Raises:
            EngineError: Writing failed on a rank, for example because its disk is full.
        """

    def load_checkpoint(self, path: str) -> None:
        """Take back what :meth:`save_checkpoint` has written. A collective.

        Any parallel layout may have written it; in the same layout everything comes back bit for bit.

        Raises:
            EngineError: The checkpoint belongs to another model, is damaged, or holds what would run code.
        """


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of one process, in bytes.

    Attributes:
        peak: The most that was allocated since it was last asked for, or since the process began.
        released: What the device has got back.
    """

    peak: int
    released: int


class OffloadingEngine(TrainingEngine, Protocol):
    """A training engine that can leave its device to a rollout engine: capability ``offload``.

    ``engine.offload`` needs it.
    """

    def offload(self) -> MemoryUse:
        """Move the parts that ``engine.offload`` names from the device to the host. A collective.

        ``export_weights`` works without them. Any other call that needs them brings them back before, bit for bit;
        gradients, which no update needs of the one before, come back as zeros.
        """


class GeneratingEngine(TrainingEngine, Protocol):
    """A training engine that generates with the weights that it trains: a rollout engine is ``part_of`` it.

    Its ranks together are one :class:`RolloutEngine` for the driver, without weights to load. What it generates
    leaves no trace: training goes on as if nothing had been generated.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, the same on all ranks; data-parallel replicas divide them among themselves."""

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate, as :meth:`RolloutEngine.poll` does; each reporting rank returns what its replica has made."""

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Give up requests, as :meth:`RolloutEngine.abort` does; one of the ranks returns what there is."""

    def weights_version(self) -> int:
        """Say which weights the next response comes from: how many updates they have behind them."""


class ObservableEngine(TrainingEngine, Protocol):
    """A training engine whose computation can be compared with others: capability ``observation``.

    ``anytron verify`` needs it; training does not.
    """

    def logits(self, micro_batch: RaggedBatch) -> Tensor | None:
        """Compute the policy's whole logits, without gradients, to compare them with another computation.

        For small micro-batches: no pass of a training step ever makes them.

        Args:
            micro_batch: The same on every rank.

        Returns:
            float32 ``[T, V]`` on reporting ranks (a host tensor), None elsewhere. Row t holds the logits
            *after* token t, untouched by the temperature; V is the real vocabulary.
        """

    def attention_conformance(self) -> Conformance | None:
        """Compare the platform's masks and attention kernels for this model with their definition, in float64.

        Returns:
            What was found on this rank; None if the engine has nothing to check.
        """


class InspectableEngine(TrainingEngine, Protocol):
    """A training engine that can say where a number stops being finite: capability ``inspection``.

    ``anytron replay`` needs it; training does not.
    """

    def inspect_update(
        self, micro_batches: Sequence[RaggedBatch], loss: LossFunction, model: UpdatedModel
    ) -> Inspection:
        """Do the passes of an update, forward and backward, and look at every number. Nothing is updated.

        For an engine of one rank. Arguments as in :meth:`TrainingEngine.update`.
        """


@dataclass(frozen=True)
class PromptInputs:
    """What responses are generated for.

    Attributes:
        tokens: Token ids, at least one; as many image tokens as the model makes of the images.
        images: The prompt's images; None without.
    """

    tokens: tuple[int, ...]
    images: ImagePatches | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; fields as in ``rollout`` of the configuration, token ids resolved."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """One response that is to be made.

    Attributes:
        id: The driver's number, unique among those that an engine holds.
        prompt: What it answers.
        sampling: How to sample it.
        seed: Of this response alone, in ``[0, 2**63)``: its tokens depend on nothing that shares its batch, and not on
            the engine that makes it, among engines of one kind. (Where rounding differs, as it does between batches of
            different shapes, a token may, once in about a million.)
    """

    id: int
    prompt: PromptInputs
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Response:
    """One generated response.

    Attributes:
        tokens: Generated ids, the end token included if there is one; may be empty.
        log_probs: Log-prob of each under the model at the sampling temperature, before top-p, top-k and the
            suppression of end tokens.
        stop_reason: ``stop`` = an end token or a stop string ended it, ``length`` = the length limit did, ``abort`` =
            :meth:`RolloutEngine.abort` did.
        versions: Version of the weights that made each token.
        routing: The experts of each token of prompt and response but the last (:mod:`anytron.engines.routing`), on the
            host; None unless ``rollout.replay_routing`` asks for it.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stop_reason: StopReason
    versions: tuple[int, ...]
    routing: Tensor | None = None


class RolloutEngine(Protocol):
    """Generates responses, in a process of its own.

    It works while it is polled. So a driver that polls several engines in turn has responses as they finish, and
    between two polls an engine can be given more requests or new weights, without threads in it.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, any number; return at once."""

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate, until a response has finished or about so much time is over.

        Returns:
            Number and response of each request that has finished since the last poll; each is given once. Nothing at
            once if there are no requests.

        Raises:
            EngineError: No weights have been loaded.
        """

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Give up requests.

        Args:
            ids: Which; None = all that the engine holds. It passes over those that it does not hold.

        Returns:
            What there is of their responses, with the stop reason ``abort``.
        """

    def load_weights(self, origin: WeightOrigin) -> int:
        """Take new weights, verify them, and return the version now in use.

        The version before stays in use if nothing begins to arrive. After any later failure the engine has no
        weights: it refuses to generate until all weights have been given again.

        What is under way goes on with them.

        Raises:
            EngineError: A tensor is missing, unknown, or of another shape.
            TransferError: The weights did not arrive as they were sent.
        """

    def describe(self) -> Mapping[str, Any]:
        """Facts for the run's records: device, patches of this process, versions."""


class ComparableRollout(RolloutEngine, Protocol):
    """A rollout engine that can be asked whether it has the weights that it was given: capability ``comparison``.

    ``rollout.check_weights_every`` needs it.
    """

    def differing_weights(self, origin: WeightOrigin) -> list[str]:
        """Compare the weights in use with others, bit for bit, and change nothing.

        Args:
            origin: The others, which are cast as :meth:`load_weights` does.

        Returns:
            Names of those that differ, or that are on one side only.

        Raises:
            TransferError: The weights did not arrive as they were sent.
        """


class SleepingRollout(RolloutEngine, Protocol):
    """A rollout engine that can leave its device to training ranks: capability ``sleep``.

    ``rollout.sleep`` needs it.
    """

    def sleep(self) -> MemoryUse:
        """Give the device's memory back. It has no weights then, and no requests; ``load_weights`` wakes it."""


class ObservableRollout(RolloutEngine, Protocol):
    """A rollout engine whose computation can be compared with others: capability ``observation``."""

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute whole logits of given sequences, each by itself and without padding.

        Returns:
            float32 ``[L, V]`` host tensors, row t after token t, untouched by any temperature. Each row may have any
            constant added: an engine may answer with the log-softmax.
        """
