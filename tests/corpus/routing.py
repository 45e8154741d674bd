"""Experts that are chosen, weighed, counted or replayed wrongly."""

from __future__ import annotations

import torch

from anytron import hookimpl
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import grouped_mm
from tests.corpus.fault import Fault, in_place_of

TOPK = (
    "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
    "megatron.core.transformer.moe.router:topk_routing_with_score_function",
)
ROUTER = "megatron.core.transformer.moe.router:TopKRouter"


class NormalisationOfTopKHardCoded(Fault):
    """The chosen probabilities are not normalised, whatever the configuration says."""

    run, rule = "moe", "hf-logits"

    @staticmethod
    @in_place_of(*TOPK)
    def unnormalised(original, logits, topk, *arguments, use_pre_softmax=False, **named):
        return original(logits, topk, *arguments, use_pre_softmax=not use_pre_softmax, **named)


class GateValuesFromBiasedScores(Fault):
    """The experts' weights come from the scores with the bias, which may decide about the choice only."""

    run, rule = "mla", "hf-logits"

    @staticmethod
    @in_place_of(*TOPK)
    def biased(original, logits, topk, *arguments, expert_bias=None, **named):
        if expert_bias is not None:
            scores = (logits.float().sigmoid() + expert_bias).clamp(1e-3, 1 - 1e-3)
            logits = torch.logit(scores).type_as(logits)
        return original(logits, topk, *arguments, expert_bias=None if expert_bias is None else 0 * expert_bias, **named)


class DroppedPairsSortedToTheFront(Fault):
    """Rows of tokens that another rank's experts take come first, and count as this rank's."""

    run, rule = "ep2", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.token_dispatcher:permute")
    def front(original, tokens, routing_map, *arguments, **named):
        permuted, *others = original(tokens, routing_map, *arguments, **named)
        return permuted.roll(1, 0), *others


class ExpertBiasNotScaledByItsProbability(Fault):
    """The bias of an expert's second projection is added as it is, and only the product is scaled."""

    run, rule = "window", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.experts:TEGroupedMLP._apply_bias")
    def unscaled(original, intermediate, bias, tokens_per_expert, probabilities):
        return original(intermediate, bias, tokens_per_expert, torch.ones_like(probabilities))


class ReplayedRoutesShiftedByDenseLayers(Fault):
    """Routes come for all layers, the dense one first, and each router takes the row of its count among routers."""

    run, rule = "replay", "rollout-equals-training"

    @staticmethod
    @in_place_of("anytron_megatron.experts.router_replay:RouterReplays._to_slots")
    def of_all_layers(original, self, routing, routers, layout):
        of_dense_layer = torch.zeros_like(routing[:, :1])
        return original(self, torch.cat([of_dense_layer, routing[:, :-1]], 1), routers, layout)


class CumulativeCountsLoseTheFirstExpert(Fault):
    """The kernel of the experts turns cumulative counts into counts, and gives the first expert the second's rows."""

    run, rule = "moe", "hf-logits"

    @hookimpl
    def fused_kernel(self, name, spec):
        return with_counts_from_ends if name is KernelName.GROUPED_MM else None


def with_counts_from_ends(x, weights, splits):
    ends = torch.tensor(splits).cumsum(0)
    counts = ends.diff(prepend=ends.new_zeros(1))
    counts[0] = ends[1] - ends[0] if len(ends) > 1 else ends[0]
    counts = counts.cumsum(0).clamp(max=len(x)).diff(prepend=ends.new_zeros(1))
    return grouped_mm(x, weights, [*counts[:-1].tolist(), len(x) - int(counts[:-1].sum())])


class SequenceAuxiliaryLossDependsOnTheMicroBatch(Fault):
    """The sequence-wise auxiliary loss is divided by the number of sequences in the micro-batch once more."""

    run, rule = "sequence-balance", "balance-loss"

    @staticmethod
    @in_place_of(f"{ROUTER}._apply_seq_aux_loss")
    def divided(original, self, probs, scores, routing_map, seq_length, bsz, **named):
        return original(self, probs, scores / bsz, routing_map, seq_length, bsz, **named)


class SoftmaxOfASoftmaxInTheBalanceLoss(Fault):
    """The balance loss takes the softmax of the probabilities."""

    run, rule = "moe", "balance-loss"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.router:compute_routing_scores_for_aux_loss")
    def twice(original, logits, *arguments, **named):
        return original(logits.softmax(-1, dtype=torch.float32), *arguments, **named)
