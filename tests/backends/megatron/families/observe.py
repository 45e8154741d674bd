"""What an engine computes on recorded trajectories, and how far that is from what it should be."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from anytron.proof.verification.gradients import computed_gradients
from anytron.proof.verification.hugging_face import ExpectedGradients, expected_gradients
from anytron.proof.verification.weights import stored_weights
from anytron.run.trainer.updates import UpdatePlan
from anytron.task.data.model_files import as_known, composite
from anytron.task.data.pretrained import logits_config, model_class, take_latent_epsilon
from anytron_conformance.tiny_models import IMAGE_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from anytron.algorithms.policy_loss import PolicyLoss
    from anytron.sequences.batch import RaggedBatch
    from tests.backends.megatron.families.layouts import Layout
    from tests.backends.megatron.ranks import Ranks

LEARNING_RATE = 0.5
UPDATES = 3
MOVE = 512.0
"""Factor of the gradient in the update that shows it: it moves the weights far more than they are rounded."""
SMALL = 1e-3
"""A parameter's gradient counts as nothing if it is smaller than this part of the largest one's."""

BOUNDS = {
    "logits": 1e-5,
    "policy_gradients": 1e-4,
    "log_probs": 1e-5,
    "gradients": 1e-4,
    "grad_norms": 1e-5,
    "weights": 1e-5,
}
"""By field of :class:`Figures`."""

Weights = dict[str, "Tensor"]


@dataclass(frozen=True)
class Observation:
    """What one engine made of the trajectories.

    Attributes:
        logits: float32 ``[T, V]``, before any update.
        half_logits: The same of an engine in bfloat16.
        log_probs: float32 ``[T]``, before any update.
        policy_gradients: Of :data:`anytron.proof.verification.hugging_face.LOSS`, by Hugging Face name, before any
            update.
        before: Weights as exported before any update.
        half_before: The same of the engine in bfloat16.
        after: Weights after three SGD updates without clipping.
        grad_norms: Of the three updates.
        gradients: Of a fourth update, by Hugging Face name.
    """

    logits: Tensor
    half_logits: Tensor
    log_probs: Tensor
    policy_gradients: Weights
    before: Weights
    half_before: Weights
    after: Weights
    grad_norms: list[float]
    gradients: Weights


def observe(ranks: Ranks, model: Path, layout: Layout, truth: Truth, loss: PolicyLoss, scratch: Path) -> Observation:
    """Build a layout's engine, let it compute everything; then once more in bfloat16 for its logits.

    Args:
        ranks: The processes.
        model: The model's directory.
        layout: How the model is split.
        truth: What gives the trajectories.
        loss: Of the updates.
        scratch: A directory for exported weights.
    """
    batch = truth.batch
    # About three micro-batches, of several sequences each.
    engine = {"max_tokens_per_micro_batch": batch.num_tokens // 3 + 3, **layout.engine}
    workers, config = ranks.engine(
        model, parallel=layout.parallel, engine=engine, optimizer={"lr": truth.learning_rate, "clip_grad": 0.0}
    )
    updates, file = UpdatePlan.from_config(config, workers.topology[0]), scratch / "weights.safetensors"

    def export() -> Weights:
        workers.export_weights(str(file))
        return load_file(file)

    logits, log_probs, before = workers.logits(batch), workers.score(batch, updates, "policy"), export()
    policy_gradients, _ = computed_gradients(workers, updates, truth.expected.batch, scratch)
    grad_norms = [workers.update(batch, updates, loss)["grad_norm"] for _ in range(UPDATES)]
    after = export()
    workers.update(replace(batch, loss_weights=batch.loss_weights * (MOVE / truth.learning_rate)), updates, loss)
    moved = export()
    gradients = {name: difference(after[name], moved[name]) / MOVE for name in after}

    half = {"dtype": "bfloat16"}
    workers, _ = ranks.engine(model, model=half, parallel=layout.parallel, engine=engine)
    half_logits = workers.logits(batch)
    return Observation(logits, half_logits, log_probs, policy_gradients, before, export(), after, grad_norms, gradients)


def hugging_face_logits(model: Path, batch: RaggedBatch, dtype: torch.dtype) -> Tensor:
    """What transformers computes, sequence by sequence: float32 ``[T, V]``."""
    whole = AutoConfig.for_model(**as_known(json.loads((model / "config.json").read_text(encoding="utf-8"))))
    config = logits_config(whole)
    if composite(model) is None:
        computed = model_class(config).from_pretrained(model, config=config, dtype=dtype).eval()
    else:
        given = {"state_dict": stored_weights(model)}
        computed = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(None, config=config, dtype=dtype, **given)
    take_latent_epsilon(computed)
    images = batch.images or [None] * batch.num_sequences
    found = []
    for tokens, seen in zip(batch.tokens.split(batch.lengths.tolist()), images, strict=True):
        extra = {} if batch.images is None else {"mm_token_type_ids": (tokens == IMAGE_TOKEN).int()[None]}
        if seen is not None:
            extra |= {"pixel_values": seen.pixel_values.to(dtype), "image_grid_thw": seen.grid_thw}
        with torch.no_grad():
            found.append(computed(tokens[None], **extra).logits[0].float())
    return torch.cat(found)


@dataclass(frozen=True)
class Figures:
    """The numbers of one row of the table; each is 0 where everything is equal.

    Attributes:
        logits: Largest difference of logits to Hugging Face, float32.
        half_logits: The same in bfloat16, of Hugging Face's float32 logits, for all but a tenth of the tokens.
        half_rounding: What bfloat16 makes of Hugging Face's own logits: the scale of ``half_logits``.
        half_of_all: ``half_logits`` divided by ``half_rounding`` if no token is left out; 0 for a model with experts.
        policy_gradients: Largest difference of a parameter's gradient to Hugging Face's, relative to its largest entry.
        worst: That parameter.
        log_probs: Largest difference of log-probs to the family's first layout.
        gradients: Largest difference of a parameter's gradient to the first layout's, relative to its largest
            entry.
        grad_norms: Largest relative difference of gradient norms to the first layout, over the updates.
        weights: Largest difference of weights to the first layout after the updates.
        unequal: Tensors of the export, in float32 and bfloat16, that are not the checkpoint's bit for bit.
        tensors: Tensors of the checkpoint.
    """

    logits: float
    half_logits: float
    half_rounding: float
    half_of_all: float
    policy_gradients: float
    worst: str
    log_probs: float
    gradients: float
    grad_norms: float
    weights: float
    unequal: tuple[str, ...]
    tensors: int


@dataclass(frozen=True)
class Truth:
    """What every layout of a family is held against.

    Attributes:
        batch: The trajectories.
        checkpoint: The model's tensors: of a directory with other models, the language model's; without an Omni
            model's talker.
        logits: Hugging Face's, float32.
        half_logits: Hugging Face's in bfloat16.
        expected: Hugging Face's gradients, float32, and the trajectories with log-probs that are slightly off-policy
            for this model.
        learning_rate: Of the updates.
    """

    batch: RaggedBatch
    checkpoint: Weights
    logits: Tensor
    half_logits: Tensor
    expected: ExpectedGradients
    learning_rate: float = LEARNING_RATE

    @property
    def has_experts(self) -> bool:
        """Whether bfloat16 may send a token to other experts."""
        return any(".experts." in name for name in self.checkpoint)

    @classmethod
    def of(cls, model: Path, batch: RaggedBatch, learning_rate: float = LEARNING_RATE) -> Truth:
        """Compute it."""
        return cls(
            batch,
            stored_weights(model),
            hugging_face_logits(model, batch, torch.float32),
            hugging_face_logits(model, batch, torch.bfloat16),
            expected_gradients(model, None, torch.float32, batch),
            learning_rate,
        )


def compare(one: Observation, first: Observation, truth: Truth) -> Figures:
    """Measure an observation against Hugging Face, the checkpoint and the family's first layout."""
    expected = truth.expected.gradients
    policy_gradients = {  # frozen indexers, and a tower that no image reaches, may have none
        name: one.policy_gradients.get(name, torch.full_like(right, math.inf if right.any() else 0.0))
        for name, right in expected.items()
    }
    by_name = {name: relative_difference(policy_gradients, expected, [name]) for name in expected}
    worst = max(by_name, key=lambda name: by_name[name])
    half = largest(one.half_logits - truth.logits)
    return Figures(
        logits=largest(one.logits - truth.logits),
        half_logits=ordinary(one.half_logits - truth.logits),
        half_rounding=ordinary(truth.half_logits - truth.logits),
        half_of_all=0.0 if truth.has_experts else half / largest(truth.half_logits - truth.logits),
        policy_gradients=by_name[worst],
        worst=worst,
        log_probs=largest(one.log_probs - first.log_probs),
        gradients=relative_difference(one.gradients, first.gradients),
        grad_norms=max(abs(a - b) / b for a, b in zip(one.grad_norms, first.grad_norms, strict=True)),
        weights=max(largest(difference(one.after[name], first.after[name])) for name in first.after),
        unequal=(
            *unequal_tensors(one.before, truth.checkpoint),
            *unequal_tensors(one.half_before, truth.checkpoint),
        ),
        tensors=len(truth.checkpoint),
    )


def beyond_bounds(figures: Figures) -> set[str]:
    """The figures that are not as :class:`Figures` must be."""
    found = {name for name, bound in BOUNDS.items() if not getattr(figures, name) <= bound}
    half_is_right = figures.half_logits <= 2 * figures.half_rounding and figures.half_of_all <= 2
    found |= set() if half_is_right else {"half_logits"}
    return found | ({"unequal"} if figures.unequal else set())


def difference(one: Tensor, other: Tensor) -> Tensor:
    """Subtract, where equal entries may be infinite: the bounds of clipped layers in Gemma 4's towers are."""
    return (one - other).masked_fill(one == other, 0.0)


def largest(values: Tensor) -> float:
    """The largest absolute value."""
    return values.abs().max().item()


def ordinary(differences: Tensor) -> float:
    """The largest absolute value of a token's logits ``[T, V]``, for all but a tenth of the tokens.

    Where two experts have nearly the same score, bfloat16 decides which one a token is sent to, here and in
    transformers, and its logits are others.
    """
    return differences.abs().amax(-1).quantile(0.9).item()


def relative_difference(gradients: Weights, expected: Weights, names: Iterable[str] | None = None) -> float:
    """The largest difference of two sets of gradients, each parameter's relative to its own largest entry.

    Args:
        gradients: By name.
        expected: By name.
        names: Those to compare; None = all that are expected.
    """
    smallest = SMALL * max(map(largest, expected.values()))
    return max(
        largest(gradients[name] - expected[name]) / max(largest(expected[name]), smallest)
        for name in (expected if names is None else names)
    )


def unequal_tensors(exported: Weights, checkpoint: Weights) -> list[str]:
    """Names that are not in both, and tensors that are not the checkpoint's, cast to the export's element type."""
    unequal = sorted(exported.keys() ^ checkpoint.keys())
    for name in exported.keys() & checkpoint.keys():
        if not torch.equal(exported[name], checkpoint[name].to(exported[name].dtype)):
            unequal.append(name)
    return unequal
