"""The rules of level ``model``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import compare_logits, compare_token_outputs, largest, measured, tolerance
from anytron.proof.verification.engines import first_sequences
from anytron.proof.verification.gradients import compare_gradients
from anytron.proof.verification.weights import tied_copies
from anytron_conformance.model.observed import (
    ARRANGED,
    CONTEXT,
    DEEPSEEK_V3,
    DENSE_DEEPSEEK_V3,
    EVERY_HEAD,
    EXPERT,
    FAMILIES,
    HALF,
    INTERLEAVED,
    MIXTURES,
    ONE,
    ONE_HEAD,
    PADDED,
    PADDED_CONTEXT,
    PIPELINE,
    QWEN3,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    SPLIT_EXPERTS,
    TENSOR,
    TENSOR_EXPERT,
    Observer,
    Seen,
    cases,
)
from anytron_conformance.rules import rule
from anytron_conformance.training_ranks import START_S, hold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

ONE_RANK = (*cases(ONE, *FAMILIES, EVERY_HEAD, ONE_HEAD), *cases(HALF, QWEN3, DENSE_DEEPSEEK_V3, QWEN3_5, QWEN3_VL))


@rule(
    "model-logits",
    "model",
    "A model's logits equal transformers'.",
    cases=ONE_RANK,
    limit_s=START_S,
)
def model_logits(subject: Subject, case: Case) -> None:
    """Compute whole logits of four sequences in the training engine, with the platform's kernels, masks and layout.

    transformers computes them on the host, one sequence after another; their log-softmax must agree. Faults of
    attention (packed sequences that see each other, a wrong scale, wrong key heads), of norms (eps), of positions, and
    of hooks that change the micro-batch break the rule. Level ``kernels`` finds the kernel at fault.
    """
    seen = _see(subject, case)
    result = compare_logits("", seen.dtype, seen.truth.logits, seen.forward.logits, "transformers on the host")
    hold(result, "The logits differ from transformers'.")


@rule(
    "model-log-probs",
    "model",
    "Log-probs and entropies of a response equal what transformers' logits give, at any temperature.",
    cases=ONE_RANK,
    limit_s=START_S,
)
def model_log_probs(subject: Subject, case: Case) -> None:
    """Score eight sequences at the temperatures 1 and 0.7, as a training step does.

    Faults of the log-prob kernel (temperature, entropy, padded vocabulary) break the rule, and so does a
    ``postprocess_output`` that returns values in another order.
    """
    seen = _see(subject, case)
    first = first_sequences(seen.truth.batch)
    result = compare_token_outputs("", seen.dtype, seen.truth.logits, first, seen.forward.by_temperature)
    hold(result, "Log-probs or entropies differ from what transformers' logits give.")


@rule(
    "model-gradients",
    "model",
    "The gradient of every parameter equals transformers'.",
    cases=ONE_RANK,
    limit_s=START_S,
)
def model_gradients(subject: Subject, case: Case) -> None:
    """Do the passes of an update on eight sequences at temperature 0.7, with a loss that has all of its terms.

    transformers computes the same loss, whose old log-probs lie on both sides of the clip bounds. Every parameter must
    have a gradient. A wrong backward pass of a kernel breaks the rule. The message names the first parameter with a
    difference on the way back from the loss, and the kernel to check.
    """
    seen = _see(subject, case)
    _compare_gradients(seen.gradients, seen.truth.gradients, seen.dtype, "transformers'")


@rule(
    "packed-equals-padded",
    "model",
    "Padded rows (bshd) give the same log-probs, entropies and gradients as packed sequences (thd).",
    cases=tuple(cases(PADDED, *ARRANGED)),
    limit_s=START_S,
)
def packed_equals_padded(subject: Subject, case: Case) -> None:
    """Compute the same values in both formats on one rank.

    Kernels break the rule if they let a token see padding or another sequence of the pack, and masks break it if
    they differ between the formats.
    """
    _compare_with_one_rank(subject, case, "Padded rows give other numbers than packed sequences.")


@rule(
    "tensor-parallel",
    "model",
    "Two tensor-parallel ranks give the same log-probs, entropies and gradients as one.",
    cases=tuple(cases(TENSOR, *ARRANGED)),
    limit_s=START_S,
)
def tensor_parallel(subject: Subject, case: Case) -> None:
    """Split every layer over two ranks, also activations outside of attention and MLP (sequence parallelism).

    Wrong collectives (a sum that averages, or omits a rank) break the rule, and so does a log-prob kernel that treats
    its part of the vocabulary as the whole.
    """
    _compare_with_one_rank(subject, case, "Two tensor-parallel ranks give other numbers than one rank.")


@rule(
    "pipeline-parallel",
    "model",
    "Two pipeline stages give the same log-probs, entropies and gradients as one.",
    cases=(*cases(PIPELINE, *ARRANGED), *cases(INTERLEAVED, QWEN3, QWEN3_MOE, DEEPSEEK_V3)),
    limit_s=START_S,
)
def pipeline_parallel(subject: Subject, case: Case) -> None:
    """Split the layers over two ranks, which send each other activations and their gradients.

    This includes an interleaved schedule, with two pieces of the model on each rank (PP2 x VPP2).
    Point-to-point communication that does not wait breaks the rule, and so do hooks that keep state of one
    micro-batch, or of one piece of the model, while several are in progress.
    """
    _compare_with_one_rank(subject, case, "Two pipeline stages give other numbers than one stage.")


@rule(
    "context-parallel",
    "model",
    "Two context-parallel ranks give the same log-probs, entropies and gradients as one.",
    cases=(*cases(CONTEXT, *ARRANGED), *cases(PADDED_CONTEXT, QWEN3, DEEPSEEK_V3, QWEN3_NEXT, QWEN3_VL)),
    limit_s=START_S,
)
def context_parallel(subject: Subject, case: Case) -> None:
    """Split every sequence over two ranks.

    Attention kernels break the rule if they treat a part of a sequence as the whole: the last query of a call stands
    at the last key of the call, which need not be the end of the sequence.
    """
    _compare_with_one_rank(subject, case, "Two context-parallel ranks give other numbers than one rank.")


@rule(
    "expert-parallel",
    "model",
    "Two expert-parallel ranks give the same log-probs, entropies and gradients as one.",
    cases=(*cases(EXPERT, *MIXTURES), *cases(TENSOR_EXPERT, *MIXTURES), *cases(SPLIT_EXPERTS, QWEN3_MOE)),
    limit_s=START_S,
)
def expert_parallel(subject: Subject, case: Case) -> None:
    """Share the experts of each layer between two data-parallel ranks, which exchange tokens.

    This includes sharing between two tensor-parallel ranks, each with whole experts (TP2, EP2), and between four ranks,
    of which two share each expert (DP2, TP2, EP2, ETP2). Faults of all-to-all collectives of unequal parts, of
    kernels for the permutation of tokens and of grouped products break the rule.
    """
    _compare_with_one_rank(subject, case, "Two expert-parallel ranks give other numbers than one rank.")


def _see(subject: Subject, case: Case) -> Seen:
    family, layout = case.values
    return Observer.of(subject).see(family, layout)


def _compare_with_one_rank(subject: Subject, case: Case, what: str) -> None:
    """Compare a layout with one rank.

    Raises:
        Broken: The layouts give different values.
        Inapplicable: One rank cannot run the model; other rules report that.
    """
    one, seen = Observer.of(subject).see(case.values[0], ONE), _see(subject, case)
    if not one.is_whole:
        raise Inapplicable("there is nothing to compare with: one rank cannot compute it, see the rule model-gradients")
    differences, limit = {}, 0.0
    for temperature, outputs in seen.forward.by_temperature.items():
        for name, values in vars(one.forward.by_temperature[temperature]).items():
            if name in ("log_probs", "entropy"):
                differences[f"{name} at {temperature:g}"] = largest(getattr(outputs, name) - values)
                limit = max(limit, tolerance(seen.dtype, values))
    worst = max(differences.values())
    hold(measured("", worst, limit, ", ".join(f"{name} {value:.2g}" for name, value in differences.items())), what)
    _compare_gradients(seen.gradients, one.gradients, seen.dtype, "one rank's")


def _compare_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: str, whose: str) -> None:
    unknown = found.keys() - expected.keys() - tied_copies(found, expected)
    reasons = {f"unknown to the model ({', '.join(sorted(unknown))})": len(unknown)}
    result = compare_gradients("", found, expected, dtype=dtype, skipped=reasons, what="parameters", whose=whose)
    hold(result, f"Gradients differ from {whose}.")


RULES = (
    model_logits,
    model_log_probs,
    model_gradients,
    packed_equals_padded,
    tensor_parallel,
    pipeline_parallel,
    context_parallel,
    expert_parallel,
)
