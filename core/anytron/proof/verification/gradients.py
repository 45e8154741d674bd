"""Compare the gradient of each parameter with the gradient of the Hugging Face model, which runs in the driver.

The report on gradients that differ says where to look for the fault.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.proof.verification.comparisons import FACTORS, largest, measured
from anytron.proof.verification.engines import first_mini_batch, gradient_temperature, plan_of
from anytron.proof.verification.hugging_face import LOSS, expected_gradients, off_policy
from anytron.proof.verification.weights import tied_copies
from anytron.run.trainer.models import model_directory
from anytron.task.data.pretrained import INDEXER
from anytron.workers.engines.training_engine import VALUE_HEAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.config.schema import ModelPart, RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Additions, UpdatedModel
    from anytron.workers.weights.transfer import WeightManifest


SMALL = 1e-3
"""A gradient's difference is divided by its largest entry, or by this part of the largest entry of all gradients if
that is more: small gradients may be what rounding leaves of a sum that is 0, as for key biases."""
PER_LOG_PROB, MOST = 100, 1e-2
"""Allowed relative difference of gradients: the first times the largest difference of log-probs, at most the second. In
transformers, float32 instead of float64 changes SmolLM2-135M's gradients by 2e-3 and its log-probs by 2.4e-5."""
ROUNDING = 1e-5
"""A gradient below this part of the expected one counts as 0; expected ones below this part of the largest may be 0."""
SHOWN = 3
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)")
_IN_A_LAYER = ("mlp", "post_attention_layernorm", "o_proj", "out_proj", "self_attn", "linear_attn", "input_layernorm")
"""From a layer's output to its input."""


@dataclass(frozen=True)
class Difference:
    """How far a gradient is from the expected one.

    Attributes:
        name: Name of the parameter.
        relative: The largest absolute difference of entries, divided by the largest expected entry; 1 if there is no
            gradient.
        words: What is wrong with the gradient, in words; only used if it is wrong.
        absent: Whether the gradient is missing.
    """

    name: str
    relative: float
    words: str
    absent: bool = False


def compare_gradients(
    check: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    dtype: str,
    skipped: Mapping[str, int],
    what: str,
    whose: str = "Hugging Face's",
    forward: float = 0.0,
) -> Result:
    """Compare the gradients of a training engine with the expected gradients.

    Args:
        check: Name of the check.
        found: Gradients of the training engine, float32, by parameter name.
        expected: Expected gradients, float32, by name, of every parameter that must have a gradient.
        dtype: Element type that the engine computes in.
        skipped: Number of tensors that are not compared, by reason.
        what: Name of the tensors to which the gradients belong, for messages.
        whose: Whose gradients ``expected`` are, as a genitive for messages: ``transformers'``.
        forward: Largest difference of the log-probs that the two sides compute, which another check judges; it raises
            the tolerance (:data:`PER_LOG_PROB`).
    """
    # Gradients add up the differences of the forward pass.
    limit = max(10 * FACTORS[dtype], min(PER_LOG_PROB * forward, MOST))
    size = max((largest(tensor) for tensor in expected.values()), default=0.0)
    if not expected or size == 0.0:
        return Result(check, "failed", f"there is nothing to compare: {whose} gradients are 0{_counted(skipped)}")
    differences = [_difference(name, found.get(name), tensor, size, whose) for name, tensor in expected.items()]
    worst = sorted(differences, key=lambda one: -one.relative)
    wrong = [one for one in worst if not one.relative <= limit]
    if not wrong:
        detail = f"{len(expected)} {what}, the worst is {worst[0].name}{_counted(skipped)}"
        return measured(check, worst[0].relative, limit, detail)
    named = ", ".join(f"{one.name} by {one.relative:.2g}" for one in wrong[:SHOWN])
    detail = f"{len(wrong)} of {len(expected)} {what} differ, {named}; {_where_to_look(wrong, expected)}"
    return measured(check, worst[0].relative, limit, f"{detail}{_counted(skipped)}")


def compare_recomputed(check: str, dtype: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Result:
    """Compare gradients with and without recomputation of activations.

    Args:
        check: Name of the check.
        dtype: Element type that the engine computes in.
        found: Gradients with recomputation, float32, by parameter name.
        expected: Gradients without recomputation.
    """
    result = compare_gradients(
        check, found, expected, dtype=dtype, skipped={}, what="gradients", whose="kept activations'"
    )
    if result.status == "passed":
        return result
    why = (
        "a kernel returns a different result at the second call, or the runtime's get_rng_state and set_rng_state do "
        "not restore dropout"
    )
    return replace(result, detail=f"{why}; {result.detail}")


def may_be_frozen(name: str, parts: Sequence[ModelPart]) -> bool:
    """Whether a weight may have no gradient: ``model.freeze`` may cover it, or it belongs to an indexer.

    Indexers choose keys, and a choice has no gradient, in transformers as in an engine.

    Args:
        name: The weight's name in files.
        parts: The parts of the model in ``model.freeze``.
    """
    if "visual." in name:
        return "vision_tower" in parts or "aligner" in parts
    return "language_model" in parts or INDEXER in name


def adapter_gradients(
    adapters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], scaling: float
) -> dict[str, Tensor]:
    """Compute the gradients of adapters from those of the weights that they are merged into: ``W + scaling * B A``.

    Args:
        adapters: ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` of each layer, by PEFT's names. If
            several layers share one ``A``, as query, key and value of an attention module may, its gradient is the sum
            over these layers.
        gradients: float32 ``[out, in]``, by the weights' names in files.
        scaling: Factor of an adapter's output.

    Returns:
        The gradients of the adapters, float32, by PEFT's names, without layers whose weight is not among ``gradients``.
    """
    expected: dict[str, Tensor] = {}
    sharing: dict[str, list[str]] = {}
    for name, first in adapters.items():
        layer, matched, _ = name.rpartition(".lora_A.")
        gradient = gradients.get(_weight_of(layer, gradients)) if matched else None
        if gradient is None:
            continue
        other = f"{layer}.lora_B.weight"
        expected[other] = scaling * gradient @ first.float().t()
        expected[name] = scaling * adapters[other].float().t() @ gradient
        parent = layer.rpartition(".")[0]
        alike = next((one for one in sharing.get(parent, []) if torch.equal(adapters[one], first)), None)
        if alike is None:
            sharing.setdefault(parent, []).append(name)
        else:
            expected[name] = expected[alike].add_(expected[name])
    return expected


def adapted_weights(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Merge adapters into a model's weights: ``W + scaling * B A``; weights without an adapter stay as they are.

    Args:
        weights: Weights of the model, float32, by their names in files.
        adapters: As for :func:`adapter_gradients`.
        scaling: Factor of an adapter's output.
    """
    merged = dict(weights)
    for name, first in adapters.items():
        layer, matched, _ = name.rpartition(".lora_A.")
        if matched:
            weight = _weight_of(layer, weights)
            merged[weight] = weights[weight] + scaling * adapters[f"{layer}.lora_B.weight"].float() @ first.float()
    return merged


def _weight_of(layer: str, weights: Mapping[str, Tensor]) -> str:
    """Name the weight of an adapted layer; files of some vision-language models have an older form of the names."""
    name = f"{layer.removeprefix('base_model.model.')}.weight"
    older = (name.replace("model.language_model.", old, 1) for old in ("model.", "language_model.model."))
    return next((one for one in (name, *older) if one in weights), name)


def _difference(name: str, found: Tensor | None, expected: Tensor, size: float, whose: str) -> Difference:
    own = largest(expected)
    if found is None:
        return Difference(name, 1.0, "is missing", absent=True)
    if found.shape != expected.shape:
        return Difference(name, math.inf, f"has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not bool(found.isfinite().all()):
        return Difference(name, math.inf, "is not finite")
    if own > ROUNDING * size and largest(found) <= ROUNDING * own:
        return Difference(name, 1.0, "is zero", absent=True)
    relative = largest(found - expected) / max(own, SMALL * size)
    wide = expected.double()
    times = float((found.double() * wide).sum() / wide.square().sum()) if own > 0.0 else math.nan
    parallel = largest(found - times * expected) <= 0.1 * largest(found - expected)
    words = f"is {times:.3g} times {whose}" if parallel else f"is off by {relative:.2g}"
    return Difference(name, relative, words)


def _where_to_look(wrong: Sequence[Difference], expected: Mapping[str, Tensor]) -> str:
    if len(wrong) == len(expected) and all(one.absent for one in wrong):
        return "no gradient reaches any parameter: look at postprocess_output and the log_prob kernel's backward pass"
    untied = any(name.startswith("lm_head.") or name == VALUE_HEAD for name in expected)
    first = min(wrong, key=lambda one: _distance(one.name, untied=untied))
    return (
        f"backward from the loss, the first is {first.name}, which {first.words}: "
        f"look at {_computed_by(first.name, untied=untied)}"
    )


def _computed_by(name: str, *, untied: bool) -> str:
    if name == VALUE_HEAD:
        return "postprocess_output, through which values go like log-probs"
    if name.startswith("lm_head.") or ("embed_tokens" in name and not untied):
        return "the log_prob kernel's backward pass, for the weight and for the entropy"
    if _LAYER.search(name) is None and "norm" in name:
        return "the log_prob kernel's backward pass for the hidden states, and at rms_norm's"
    return "the backward passes of the kernel that computes with it and of the one after it"


def _distance(name: str, *, untied: bool) -> tuple[int, int, int, str]:
    """Order parameters from the loss to the input, as far as their names tell."""
    layer = _LAYER.search(name)
    if "visual." in name:
        return 4, 0, 0, name
    if layer is not None:
        place = next((index for index, part in enumerate(_IN_A_LAYER) if part in layer[2]), len(_IN_A_LAYER))
        return 2, -int(layer[1]), place, name
    if "embed_tokens" in name:
        return (3 if untied else 0), 0, 0, name
    return (0 if name.startswith("lm_head.") or name == VALUE_HEAD else 1), 0, 0, name


def _counted(skipped: Mapping[str, int]) -> str:
    parts = [f"{count} not compared: {reason}" for reason, count in skipped.items() if count]
    return "".join(f"; {part}" for part in parts)


def check_gradients(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the gradients that the training engine computes with those of transformers.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        trainer: The training ranks, whose engine declares ``gradients``.
        batch: Sampled responses with advantages; gradients of the first of them are computed, in the run's
            micro-batches.

    Raises:
        EngineError: The engine or transformers cannot compute the gradients.
    """
    from safetensors.torch import load_file

    directory, lora = Path(config.trainer.output_dir), config.model.lora
    plan = plan_of(trainer, config)
    batch = replace(first_mini_batch(config, trainer, batch), temperature=gradient_temperature(config))
    weights: Path | None = None
    adapters: dict[str, Tensor] = {}
    if lora is not None:
        weights, alone = directory / "merged.safetensors", directory / "adapter.safetensors"
        trainer.export_weights(str(weights))
        trainer.export_weights(str(alone), "adapter")
        adapters = load_file(alone)
    try:
        expected = expected_gradients(model_directory(config), weights, getattr(torch, config.model.dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    own = trainer.score(batch, plan, "policy")
    forward = largest((own - expected.log_probs)[batch.response_mask])
    found, manifest = computed_gradients(trainer, plan, expected.batch, directory)
    wanted = expected.gradients
    if lora is not None:
        what, reasons = "adapters", {"the run trains adapters only (model.lora)": len(wanted)}
        wanted = adapter_gradients(adapters, wanted, lora.scaling)
        unknown = found.keys() - wanted.keys()
    else:
        what, frozen = "parameters", frozen_weights(found, expected.gradients, config)
        idle = {name for name in wanted.keys() - found.keys() - frozen if not wanted[name].any()}
        reasons = {
            **frozen_reasons(frozen),
            "no gradient reaches them, in transformers either": len(idle),
        }
        wanted = {name: gradient for name, gradient in wanted.items() if name not in frozen | idle}
        unknown = found.keys() - wanted.keys() - tied_copies(found, wanted)
    reasons["of multi-token prediction, which transformers does not compute"] = len(unknown & manifest.optional)
    reasons["unknown to Hugging Face's model"] = len(unknown - manifest.optional)
    return compare_gradients(
        check,
        found,
        wanted,
        dtype=config.model.dtype,
        skipped=reasons,
        what=f"{what} at temperature {batch.temperature:g}",
        forward=forward,
    )


def own_batch(config: RunConfig, trainer: TrainingWorkers, plan: UpdatePlan, batch: RaggedBatch) -> RaggedBatch:
    """Make a mini-batch of the first sequences, with old and reference log-probs slightly off the engine's own.

    Args:
        config: Configuration of the run.
        trainer: The training ranks.
        plan: Division of the batch into micro-batches and over the ranks.
        batch: Sampled responses with advantages.
    """
    batch = first_mini_batch(config, trainer, batch)
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    batch = off_policy(batch, scored.log_probs)
    return replace(batch, routing=scored.routing) if plan.replays_scoring else batch


def own_gradients(config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> dict[str, Tensor]:
    """Let the engine compute gradients on the batch of :func:`own_batch`; float32, by the weights' names in files."""
    plan = plan_of(trainer, config)
    batch = own_batch(config, trainer, plan, batch)
    return computed_gradients(trainer, plan, batch, Path(config.trainer.output_dir))[0]


def computed_gradients(
    trainer: TrainingWorkers,
    plan: UpdatePlan,
    batch: RaggedBatch,
    directory: Path,
    loss: LossFunction = LOSS,
    *,
    model: UpdatedModel = "policy",
    additions: Additions = "none",
) -> tuple[dict[str, Tensor], WeightManifest]:
    """Let the training engine compute gradients of a batch and write them to a file, and read that file.

    Args:
        trainer: Ranks of the training engine.
        plan: Division of the batch into micro-batches and over the ranks.
        batch: Batch with everything that the loss reads.
        directory: Directory for the files of the gradients.
        loss: The loss.
        model: Model whose gradients are computed.
        additions: Which of the engine's own losses (such as a router's) are added to ``loss``.

    Returns:
        The gradients, float32, by the weights' names in files; and the engine's manifest of the file.
    """
    from safetensors.torch import load_file

    if plan.replays_scoring and model == "policy":
        batch = replace(batch, routing=trainer.token_outputs(batch, plan, "policy").routing)
    file = directory / "gradients.safetensors"
    manifest = trainer.export_gradients(str(file), batch, plan, loss, model=model, additions=additions)
    found = load_file(file)
    file.unlink()
    return found, manifest


def frozen_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: RunConfig) -> set[str]:
    """Return the names of weights that have no gradient and need none (:func:`may_be_frozen`)."""
    return {name for name in expected.keys() - found.keys() if may_be_frozen(name, config.model.freeze)}


def frozen_reasons(frozen: set[str]) -> dict[str, int]:
    """Count the weights that :func:`frozen_weights` returns, by the reason why they have no gradient."""
    indexers = {name for name in frozen if INDEXER in name}
    return {
        "frozen (model.freeze)": len(frozen - indexers),
        "of indexers of sparse attention, which choose keys and have no gradient": len(indexers),
    }
