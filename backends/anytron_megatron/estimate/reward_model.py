"""The estimate of a reward model's rank: ``EngineInfo.memory`` of its engine. Imports no Megatron."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anytron.workers.engines.memory import BYTES, MemoryPart, TrainingEstimate
from anytron_megatron.checks.subject import Subject
from anytron_megatron.estimate.memory import Held, kept_elements
from anytron_megatron.estimate.tensors import model_shapes, pieces

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.workers.engines.memory import When


def estimate(run: RunConfig) -> TrainingEstimate:
    """Estimate what the rank takes that has the most.

    Args:
        run: As its ranks have it (:attr:`anytron.config.schema.RunConfig.of_reward_model`).

    Raises:
        ConfigError: The tensors of the model are not known before it is built.
    """
    subject, sizes = Subject.reward_model(run), run.parallel.sizes()
    assert subject is not None
    shapes = model_shapes(subject, predicts_ahead=False)
    split = list(pieces(shapes, subject.text, sizes))
    element, hidden = BYTES[run.model.dtype], subject.text.get("hidden_size", 0)
    tokens = math.ceil(run.engine.max_tokens_per_micro_batch / sizes.context)

    def of_stage(stage: int) -> list[MemoryPart]:
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

    parts = max(map(of_stage, range(sizes.pipeline)), key=lambda one: sum(part.size for part in one))
    return TrainingEstimate(tuple(parts), sum(math.prod(shape) for shape in shapes.values()), subject.text)
