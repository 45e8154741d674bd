"""One rank of the training engine on Megatron-Core."""

from __future__ import annotations

import collections
import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron.device.patches import Phase
from anytron.run.trainer.models import model_directory
from anytron.sequences.layout import LayoutConstraints
from anytron.workers.engines.device_memory import MemoryUse
from anytron_megatron.building import ModelBuilder, join_ranks, prepare_platform, rank_facts
from anytron_megatron.checkpoint.checkpoints import Checkpoints
from anytron_megatron.experts.experts import Experts
from anytron_megatron.models.bridge import BridgeSource
from anytron_megatron.models.loading import freeze
from anytron_megatron.options import ENGINE, MegatronOptions
from anytron_megatron.training import parallel
from anytron_megatron.training.conformance import kernel_conformance, mask_conformance, possible_formats
from anytron_megatron.training.heads import whole_logits
from anytron_megatron.training.inspection import named_gradients
from anytron_megatron.training.memory import Offload, release_memory
from anytron_megatron.training.mtp import MultiTokenPrediction
from anytron_megatron.training.schedule import forward
from anytron_megatron.training.tracing import trace_training
from anytron_megatron.training.trained_model import DataParallel, TrainedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.record.checkpoint.manifest import FileRecord
    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron.workers.engines.context import EngineContext
    from anytron.workers.engines.rollout_engine import GenerationRequest, Response
    from anytron.workers.engines.tracing import Trace, Way
    from anytron.workers.engines.training_engine import (
        Additions,
        Conformance,
        Inspection,
        ScoringRole,
        Topology,
        UpdatedModel,
    )
    from anytron.workers.weights.transfer import Sent, WeightDestination
    from anytron_megatron.critic import Critic
    from anytron_megatron.generation.policy_rollout import PolicyRollout
    from anytron_megatron.lora.adapters import Adapters
    from anytron_megatron.models.source import ModelSource
    from anytron_megatron.training.schedule import FrozenModel, ModelChunk


class MegatronEngine:
    """Trains one policy, and the critic of PPO; scores with the policy, its reference and a teacher; can also generate.

    Implements :class:`anytron.workers.engines.training_engine.TrainingEngine`. An engine with another source of
    models is a subclass with its own :meth:`open_source`.

    A reporting rank is one whose ``Topology.reports`` is True. Results are returned on these ranks; other ranks return
    None or an empty list.

    Args:
        context: Configuration, device stack and rank.
    """

    def __init__(self, context: EngineContext) -> None:
        config = context.config
        self._context = context
        self._options = MegatronOptions.of(config)
        self._sizes = self._options.sizes(config)
        self.prepare_platform()
        self._runtime = join_ranks(context, self._sizes)
        self._source = self.open_source(model_directory(config), policy=True)
        self._builder = ModelBuilder(context, self._sizes, self._runtime)
        self._preparer = self._builder.preparer(self._source)
        self._policy = self._builder.policy(self._source, self._preparer)
        freeze(self._modules(), config.model.freeze, self._source.parts)
        self._experts = Experts(
            self._modules(),
            self._source.experts_config,
            sequence_format=config.engine.sequence_format,
            replay=self._options.replay(config),
        )
        self._prediction = MultiTokenPrediction(
            self._policy, coefficient=self._options.mtp_loss_coefficient, detach=self._options.mtp_detach
        )
        self._adapters = self._builder.adapters(self._source, self._modules())
        self._has_reference = config.algorithm.kl_coefficient > 0
        self._reference: list[ModelChunk] | None = None
        if self._has_reference and self._adapters is None:
            self._reference = self._builder.language_model(self._source, self._preparer)
        self._teacher: FrozenModel | None = None
        if config.teacher is not None:
            self._teacher = self._builder.frozen(self.open_source(Path(config.teacher.path), policy=False))
        self._trained = TrainedModel(
            self._policy,
            self._preparer,
            config.optimizer,
            dtype=getattr(torch, config.model.dtype),
            data_parallel=DataParallel.of(config),
            steps=config.policy_steps,
            updates_per_step=config.algorithm.epochs * config.algorithm.mini_batches,
        )
        self._critic: Critic | None = None
        if config.critic is not None:
            path = config.critic.path
            source = self.open_source(model_directory(config) if path is None else Path(path), policy=False)
            self._critic = self._builder.critic(source)
        trained = {"policy": self._trained, **({} if self._critic is None else {"critic": self._critic.trained})}
        frozen = {
            "reference": [chunk.module for chunk in self._reference or []],
            "teacher": [] if self._teacher is None else self._teacher.modules,
        }
        self._offload = Offload(config.engine.offload, list(trained.values()), frozen, self._runtime)
        self._checkpoints = Checkpoints(
            trained,
            self._adapters,
            runtime=self._runtime,
            sizes=self._sizes,
            seed=config.trainer.seed,
        )
        self._rollout: PolicyRollout | None = None
        if config.rollout.engine == ENGINE:
            from anytron_megatron.generation.policy_rollout import PolicyRollout  # not every Megatron has its parts

            rows = self._builder.preparer(self._source, "bshd")
            self._rollout = PolicyRollout(self._policy, rows, config, self._sizes, vocab_size=self._source.vocab_size)
        context.stack.apply_phase(Phase.AFTER_BUILD)

    def prepare_platform(self) -> None:
        """Set the process-wide state that depends on the run, before process groups exist."""
        prepare_platform(self._context, self._sizes)

    def open_source(self, directory: Path, *, policy: bool) -> ModelSource:
        """Open a model directory.

        Args:
            directory: Initial model of the policy or the critic, or the teacher's model.
            policy: Whether it is the policy's model, whose multi-token prediction modules may be trained.
        """
        config = self._context.config
        return BridgeSource(
            directory,
            dtype=getattr(torch, config.model.dtype),
            sizes=self._sizes,
            recompute=config.engine.recompute,
            deterministic=config.engine.deterministic,
            predicts_ahead=policy and self._options.mtp_loss_coefficient > 0,
            portable=self._context.stack.platform.portable_modules,
            transformer=self._options.transformer,
        )

    def topology(self) -> Topology:
        """Return this rank's position, and what its pipeline schedule and router replay require of micro-batches."""
        return replace(
            parallel.topology(),
            # Megatron refuses other numbers in interleaved schedules (pipeline_parallel/schedules.py).
            micro_batch_multiple=self._sizes.pipeline if self._sizes.virtual_pipeline > 1 else 1,
            replays_scoring=self._options.replay(self._context.config) == "old-log-probs",
            rollout_routing=self._experts.rollout_routing,
        )

    def score(self, micro_batches: Sequence[RaggedBatch], role: ScoringRole = "policy") -> list[TokenOutputs] | None:
        """Compute log-probs and entropies of tokens with the policy, its reference or a teacher, without gradients."""
        self._offload.end()
        if role == "teacher":
            return self._the_teacher("score").score(micro_batches)
        if role == "reference":
            chunks, weights = self._reference_model()
            with weights:
                outputs = forward(chunks, micro_batches, self._preparer)
            return outputs if parallel.topology().reports else None
        outputs = forward(self._policy, micro_batches, self._preparer, self._experts.score_routing())
        routing = self._experts.recorded_routing(len(micro_batches))
        if not parallel.topology().reports:
            return None
        return [replace(one, routing=chosen) for one, chosen in zip(outputs, routing, strict=True)]

    def logits(self, micro_batch: RaggedBatch) -> Tensor | None:
        """Compute the policy's whole logits, for comparisons; each rank gathers all of them."""
        logits = whole_logits(
            self._policy, micro_batch, self._preparer, vocab_size=self._source.vocab_size, sizes=self._sizes
        )
        return logits if parallel.topology().reports else None

    def attention_conformance(self) -> Conformance | None:
        """Check the platform's masks, and with portable modules its attention kernels, against the definition.

        None = neither masks nor kernels of the platform reach the model's attention.
        """
        heads = self._source.attention_heads
        if heads is None:
            return None
        if not self._context.stack.platform.portable_modules:
            return mask_conformance(self._preparer, self._sizes)
        gaps = LayoutConstraints(align=4)  # between sequences, so that real and padded offsets differ
        preparers = [
            self._builder.preparer(self._source, each, gaps)
            for each in possible_formats(self._context.config, self._context.stack.session)
        ]
        dtype, device = getattr(torch, self._context.config.model.dtype), self._runtime.current_device()
        return kernel_conformance(preparers, heads=heads, sizes=self._sizes, dtype=dtype, device=device)

    def update(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update on this replica's part of a mini-batch."""
        self._offload.end()
        loss_fn = partial(self._prediction.add_loss, loss)
        features = self._experts.replay_routing(), self._prediction.scope
        metrics = self._trained.update(micro_batches, loss_fn, *features)
        balance = self._experts.metrics()
        return None if metrics is None else {**balance, **metrics}

    def inspect_update(
        self, micro_batches: Sequence[RaggedBatch], loss: LossFunction, model: UpdatedModel
    ) -> Inspection:
        """Do an update's passes and find the first non-finite number; nothing is updated."""
        self._offload.end()
        if model == "critic":
            return self._the_critic("inspect_update").inspect(micro_batches, loss)
        loss_fn = partial(self._prediction.add_loss, loss)
        return self._trained.inspect(micro_batches, loss_fn, self._experts.replay_routing(), self._prediction.scope)

    def values(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Compute the critic's values, without gradients."""
        return self._the_critic("values").values(micro_batches)

    def update_critic(self, micro_batches: Sequence[RaggedBatch], loss: LossFunction) -> Mapping[str, float] | None:
        """Do one optimizer update of the critic."""
        self._offload.end()
        return self._the_critic("update_critic").update(micro_batches, loss)

    def trace(self, micro_batches: Sequence[RaggedBatch], way: Way, rows_of: tuple[str, str] | None = None) -> Trace:
        """Score response tokens and trace every module of the policy, in one of two ways."""
        self._offload.end()
        if way == "generation":
            return self._the_rollout("trace").trace(micro_batches[0], rows_of)
        return trace_training(
            self._policy, micro_batches, self._preparer, rows_of, self.topology().micro_batch_multiple
        )

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests for responses of the policy."""
        self._the_rollout("submit").submit(requests)

    def poll(self, seconds: float) -> list[tuple[int, Response]]:  # noqa: ARG002 - a batch takes what it takes
        """Generate the next batch to its end; each reporting rank returns the responses of its replica."""
        return self._the_rollout("poll").poll(self._trained.updates)

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Abort requests (``ids`` = None: all); one rank, in replica 0, returns an empty response for each."""
        return self._the_rollout("abort").abort(ids)

    def weights_version(self) -> int:
        """Number of completed updates of the policy."""
        return self._trained.updates

    def export_weights(self, destination: WeightDestination[Sent]) -> Sent | None:
        """Gather the policy's weights on rank 0 and send them; rank 0 returns the result of ``destination``."""
        with self._merged():
            return self._send(self._source.export(self._modules()), destination)

    def export_adapter(self, destination: WeightDestination[Sent]) -> Sent | None:
        """Send the adapters alone to ``destination``, as :meth:`export_weights` sends the weights."""
        return self._send(self._the_adapters("export_adapter").export(), destination)

    def export_gradients(
        self,
        micro_batches: Sequence[RaggedBatch],
        loss: LossFunction,
        destination: WeightDestination[Sent],
        model: UpdatedModel = "policy",
        additions: Additions = "none",
    ) -> Sent | None:
        """Send the gradients of a loss (only the adapters' if the run trains adapters); nothing is updated."""
        self._offload.end()
        if model == "critic":
            critic = self._the_critic("export_gradients")
            return self._send(critic.gradients(micro_batches, loss, balanced=additions == "all"), destination)
        loss_fn = partial(self._prediction.add_loss, loss, coefficient=0.0 if additions == "none" else None)
        routing = self._experts.replay_routing() if additions == "all" else self._experts.unbalanced()
        self._trained.compute_gradients(micro_batches, loss_fn, routing, self._prediction.scope)
        modules = self._modules()
        export = partial(self._source.export, modules) if self._adapters is None else self._adapters.export
        return self._send(named_gradients(modules, export), destination)

    def offload(self) -> MemoryUse:
        """Move the parts in ``engine.offload`` to the host; the next call that needs one of them moves all back."""
        peak = self._runtime.memory_stats().peak_allocated
        offloaded = self._offload.begin()
        self._runtime.reset_peak_memory_stats()
        return MemoryUse(peak, offloaded)

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face model directory (without tokenizer)."""
        with self._merged():
            self._source.save(self._modules(), Path(path))

    def save_adapter(self, path: str) -> None:
        """Write the adapters in PEFT's format."""
        self._the_adapters("save_adapter").save(Path(path))

    def save_critic(self, path: str) -> None:
        """Write the critic: its trunk as a Hugging Face model directory (without tokenizer), and its head."""
        self._the_critic("save_critic").save(Path(path))

    def save_checkpoint(self, path: str, *, asynchronous: bool) -> None:
        """Begin to write the training state."""
        self._offload.end()
        self._checkpoints.save(Path(path), asynchronous=asynchronous)

    def written_files(self, *, wait: bool) -> Mapping[str, FileRecord] | None:
        """Return this rank's files of the last save; None until every rank has written its files."""
        return self._checkpoints.written_files(wait=wait)

    def load_checkpoint(self, path: str) -> None:
        """Restore a training state, which may have been saved with other parallel sizes."""
        self._offload.end()
        self._checkpoints.load(Path(path))

    def describe(self) -> Mapping[str, Any]:
        """Describe this rank for the run's records."""
        return rank_facts(self._context, self._runtime, self._preparer.mask_kind)

    def close(self) -> None:
        """Leave the process groups; another engine may be built in this process afterwards."""
        self._checkpoints.close()
        self._source.close()
        critic = [] if self._critic is None else self._critic.trained.chunks
        teacher = [] if self._teacher is None else self._teacher.modules
        chunks = [*self._trained.chunks, *(self._reference or []), *critic]
        release_memory([*(chunk.module for chunk in chunks), *teacher])
        parallel.destroy()
        self._runtime.empty_cache()

    def _modules(self) -> list[torch.nn.Module]:
        return [chunk.module for chunk in self._policy]

    def _merged(self) -> contextlib.AbstractContextManager[None]:
        """Merge adapters into the weights of the policy's modules while the context is open."""
        return contextlib.nullcontext() if self._adapters is None else self._adapters.merged()

    def _send(self, weights: Iterator[tuple[str, Tensor]], destination: WeightDestination[Sent]) -> Sent | None:
        if torch.distributed.get_rank() == 0:
            return destination.send(weights, self._trained.updates, self._is_optional)
        collections.deque(weights, maxlen=0)
        return None

    def _is_optional(self, name: str) -> bool:
        """Whether a rollout engine may leave a tensor out: it belongs to modules that predict further tokens."""
        return bool(self._source.prediction_names([name]))

    def _reference_model(self) -> tuple[list[ModelChunk], contextlib.AbstractContextManager[None]]:
        """Return the model that scores for the reference, and a context that gives it the reference's weights."""
        if not self._has_reference:
            raise EngineError(
                "This engine has no reference model.",
                where="algorithm.kl_coefficient",
                why="a reference model is loaded only if this key is above 0",
                fix="set algorithm.kl_coefficient above 0",
            )
        if self._adapters is not None:
            return self._policy, self._adapters.reference_weights()
        assert self._reference is not None
        return self._reference, contextlib.nullcontext()

    def _the_teacher(self, where: str) -> FrozenModel:
        if self._teacher is None:
            raise EngineError("This engine has no teacher.", where=where, fix="set teacher.path")
        return self._teacher

    def _the_critic(self, where: str) -> Critic:
        if self._critic is None:
            raise EngineError(
                "This engine has no critic.", where=where, fix="set algorithm.advantage=gae and critic={}"
            )
        return self._critic

    def _the_adapters(self, where: str) -> Adapters:
        if self._adapters is None:
            raise EngineError("This engine has no adapters.", where=where, fix="set model.lora={}")
        return self._adapters

    def _the_rollout(self, where: str) -> PolicyRollout:
        if self._rollout is None:
            raise EngineError(
                "The training ranks cannot generate.",
                where=where,
                why="rollout.engine names another engine",
                fix=f"set rollout.engine={ENGINE}",
            )
        return self._rollout
