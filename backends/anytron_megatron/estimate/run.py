"""Estimate the memory of training, generating and reward-model ranks (``EngineInfo.memory``). Imports no Megatron."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anytron.workers.engines.estimates import BYTES, MemoryPart, TrainingEstimate, key_value_elements, readable
from anytron_megatron.checks.subject import Subject
from anytron_megatron.estimate.memory import (
    GRADIENT_BYTES,
    Held,
    activation_bytes,
    kept_elements,
    optimizer_bytes,
    sharing_ranks,
    tile_bytes,
)
from anytron_megatron.estimate.tensors import TOWERS, adapter_pieces, model_shapes, pieces
from anytron_megatron.models.families import has_idle_tower
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.base.traits import ParallelSizes
    from anytron.config.running import OptimizerSection
    from anytron.config.schema import RunConfig
    from anytron.workers.engines.estimates import DeviceMemory, When
    from anytron_megatron.estimate.tensors import Piece


_ALIGNER = ("merger", "aligner", "projector")


def estimate(run: RunConfig) -> TrainingEstimate:
    """Estimate the memory of the rank that needs the most.

    Raises:
        ConfigError: The tensors of the model are not known before it is built.
    """
    options = MegatronOptions.of(run)
    sizes, policy = options.sizes(run), Subject.policy(run)
    shapes = model_shapes(policy, predicts_ahead=options.mtp_loss_coefficient > 0)
    split = list(pieces(shapes, policy.text, sizes))
    critic: list[Piece] = []
    if run.critic is not None:
        subject = Subject.critic(run) or policy
        critic = list(pieces(model_shapes(subject, predicts_ahead=False), subject.text, sizes))
    teacher: list[Piece] = []
    if (taught := Subject.teacher(run)) is not None:
        teacher = list(pieces(model_shapes(taught, predicts_ahead=False), taught.text, sizes))
    stages = [
        [*_of_stage(run, sizes, policy, stage, _at(split, stage), _at(critic, stage)), *_frozen_at(run, teacher, stage)]
        for stage in range(sizes.pipeline)
    ]
    parts = max(stages, key=lambda one: sum(part.size for part in one))
    total = sum(math.prod(shape) for shape in shapes.values())
    return TrainingEstimate(tuple(parts), total, policy.text)


def generation(run: RunConfig, training: TrainingEstimate, device: DeviceMemory) -> Sequence[MemoryPart]:
    """Estimate the additional memory of generation on the training ranks: the cache of Megatron's static context."""
    del device
    sizes, rollout = run.parallel.sizes(), run.rollout
    rows = math.ceil(rollout.max_batch_size / sizes.data)
    elements = key_value_elements(training.config) / (sizes.tensor * sizes.pipeline)
    size = int(rows * rollout.max_new_tokens * elements * BYTES[run.model.dtype])
    how = f"{rows} rows of {rollout.max_new_tokens} tokens, without their prompts"
    return [MemoryPart("rollout-cache", size, how, "generation")]


def estimate_reward_model(run: RunConfig) -> TrainingEstimate:
    """Estimate the memory of the reward model's rank that needs the most.

    Args:
        run: The configuration of the model's ranks (:attr:`anytron.config.schema.RunConfig.of_reward_model`).

    Raises:
        ConfigError: The tensors of the model are not known before it is built.
    """
    subject, sizes = Subject.reward_model(run), run.parallel.sizes()
    assert subject is not None
    shapes = model_shapes(subject, predicts_ahead=False)
    split = list(pieces(shapes, subject.text, sizes))
    element, hidden = BYTES[run.model.dtype], subject.text.get("hidden_size", 0)
    tokens = math.ceil(run.engine.max_tokens_per_micro_batch / sizes.context)

    def of_rank(stage: int) -> list[MemoryPart]:
        own = [piece for piece in split if piece.stage == stage]
        count = Held.of(own).total
        # Nothing is kept for a backward pass: one layer at a time, its input and what it computes.
        widest = max(kept_elements(own, subject.text, sizes).values(), default=0.0)
        passing = int((widest + hidden) * tokens * element)
        how = f"{tokens:,} tokens through one layer at a time"
        when: When = "scoring" if run.reward_model and run.reward_model.offload else "always"
        return [
            MemoryPart("reward-model", count * element, f"{count:,} numbers of {run.model.dtype}", when, exact=True),
            MemoryPart("reward-model-activations", passing, how, "scoring"),
        ]

    parts = max(map(of_rank, range(sizes.pipeline)), key=lambda one: sum(part.size for part in one))
    return TrainingEstimate(tuple(parts), sum(math.prod(shape) for shape in shapes.values()), subject.text)


def _at(split: Sequence[Piece], stage: int) -> list[Piece]:
    return [piece for piece in split if piece.stage == stage]


def _of_stage(
    run: RunConfig, sizes: ParallelSizes, policy: Subject, stage: int, own: list[Piece], critic: list[Piece]
) -> list[MemoryPart]:
    element, offload, lora = BYTES[run.model.dtype], run.engine.offload, run.model.lora
    held = Held.of(own)
    adapters = [] if lora is None else adapter_pieces(own, lora)
    at = f"stage {stage} of {sizes.pipeline}" if sizes.pipeline > 1 else "this rank"
    parts = [
        MemoryPart(
            "parameters", held.total * element, f"{held.total:,} numbers of {run.model.dtype} on {at}", exact=True
        )
    ]
    if adapters:
        count = Held.of(adapters).total
        parts.append(MemoryPart("adapters", count * element, f"{count:,} numbers of rank {lora and lora.rank}"))
    trained = adapters if lora is not None else [piece for piece in own if not _frozen(piece, run, policy)]
    parts += _state("", trained, run.optimizer, run, sizes, exact=lora is None)
    if run.algorithm.kl_coefficient > 0 and lora is None:
        when: When = "training" if "reference" in offload else "always"
        parts.append(MemoryPart("reference", held.total * element, "a second copy of the parameters", when, exact=True))
    if critic and run.critic is not None:
        count = Held.of(critic).total
        parts.append(MemoryPart("critic-parameters", count * element, f"{count:,} numbers", exact=True))
        trunk = [piece for piece in critic if piece.kind != "lm_head"]
        parts += _state("critic-", trunk, run.critic.optimizer, run, sizes, exact=False)
    return [*parts, *_passes(run, sizes, policy, stage, own)]


def _frozen_at(run: RunConfig, teacher: list[Piece], stage: int) -> list[MemoryPart]:
    """Memory of the teacher: its parameters only."""
    if not teacher:
        return []
    count = Held.of(_at(teacher, stage)).total
    when: When = "training" if "teacher" in run.engine.offload else "always"
    return [MemoryPart("teacher", count * BYTES[run.model.dtype], f"{count:,} numbers", when, exact=True)]


def _state(
    prefix: str, trained: list[Piece], optimizer: OptimizerSection, run: RunConfig, sizes: ParallelSizes, *, exact: bool
) -> list[MemoryPart]:
    """Memory of the gradients and the optimizer state of trained parameters."""
    held, offload = Held.of(trained), run.engine.offload
    replicas = sharing_ranks(sizes, distributed=run.engine.distributed_optimizer)
    state = optimizer_bytes(held, optimizer, dtype=run.model.dtype, replicas=replicas)
    shared = f", shared by {replicas[0]} ranks" if replicas[0] > 1 else ""
    if held.expert and replicas[1] != replicas[0]:
        shared += f" (experts by {replicas[1]})"
    copies = "float32 copies and " if run.model.dtype != "float32" else ""
    how = f"{copies}two moments of {held.total:,} numbers{shared} (arXiv:1910.02054)"
    how = how if optimizer.name == "adam" else f"{optimizer.name}: {copies.removesuffix(' and ') or 'nothing'}{shared}"
    return [
        MemoryPart(
            f"{prefix}gradients",
            held.total * GRADIENT_BYTES,
            f"float32, of {held.total:,} trained numbers; Megatron pads the buffers",
            "training" if "gradients" in offload else "always",
        ),
        MemoryPart(
            f"{prefix}optimizer",
            state,
            how,
            "training" if "optimizer" in offload else "always",
            exact=exact and replicas == (1, 1),
        ),
    ]


def _passes(run: RunConfig, sizes: ParallelSizes, policy: Subject, stage: int, own: list[Piece]) -> list[MemoryPart]:
    """Activations, and on the last stage the tiles of the log-probs."""
    element, hidden = BYTES[run.model.dtype], policy.text.get("hidden_size", 0)
    tokens = math.ceil(run.engine.max_tokens_per_micro_batch / sizes.context)
    kept = kept_elements(own, policy.text, sizes)
    recompute = run.engine.recompute
    size = activation_bytes(
        kept, tokens=tokens, element=element, hidden=hidden, sizes=sizes, stage=stage, recompute=recompute
    )
    how = f"{tokens:,} tokens through {len(kept)} layers, recompute={recompute} (arXiv:2205.05198)"
    parts = [MemoryPart("activations", size, how, "training")]
    if stage == sizes.pipeline - 1:
        entries = math.ceil(policy.text.get("vocab_size", 0) / sizes.tensor)
        chunk = run.engine.log_prob_chunk_tokens
        capped = policy.text.get("final_logit_softcapping") is not None
        tiles = tile_bytes(
            tokens=tokens, chunk_tokens=chunk, entries=entries, element=element, hidden=hidden, capped=capped
        )
        whole = readable(tokens * entries * 4)
        what = f"tiles of the logits of {chunk} tokens x {entries:,} entries; all logits would need {whole}"
        parts.append(MemoryPart("log-probs", tiles, what, "training"))
    return parts


def _frozen(piece: Piece, run: RunConfig, policy: Subject) -> bool:
    """Whether a tensor stays as it is: by ``model.freeze``, or in a tower that gets no images."""
    vision = TOWERS.search(piece.name) is not None
    aligner = vision and any(word in piece.name for word in _ALIGNER)
    part = "aligner" if aligner else "vision_tower" if vision else "language_model"
    return (vision and has_idle_tower(policy.config)) or part in run.model.freeze
