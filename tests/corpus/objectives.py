"""Advantages and losses that are not what their paper says."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.corpus.fault import Fault, in_place_of

REGISTERED = "anytron.algorithms.registered"
POLICY = "anytron.algorithms.policy_loss"


class PenaltyWrittenIntoAnExpandedRow(Fault):
    """A change of a few tokens' advantages is written into a view of one value per row, so that all tokens get it."""

    run, rule = "qwen3", "advantages"

    @staticmethod
    @in_place_of("anytron.algorithms.advantages:broadcast_to_tokens", role="driver")
    def penalise(original, per_sequence, lengths, response_mask):
        return original(per_sequence - 0.1, lengths, response_mask)


class PromptsTiledWhereGroupsWereCut(Fault):
    """Rewards are ordered by repetition and then by prompt, where groups are cut prompt by prompt."""

    run, rule = "qwen3", "advantages"

    @staticmethod
    @in_place_of("anytron.algorithms.advantages:compare", role="driver")
    def tiled(original, values, groups, formula):
        order = torch.arange(values.numel())
        order = torch.cat([order[start::2] for start in range(2)])
        return original(values[order], groups, formula)[order.argsort()]


class VarianceFloorShrinksAdvantages(Fault):
    """The variance of a group has a floor of 1e-6."""

    run, rule = "close-rewards", "advantages"

    @staticmethod
    @in_place_of("anytron.algorithms.advantages:grpo", role="driver")
    def floored(original, rewards, normalize_std):
        found = original(rewards, normalize_std)
        if not normalize_std:
            return found
        deviation = torch.tensor([[row[~row.isnan()].std().nan_to_num()] for row in rewards])
        return found * (deviation + 1e-4) / (deviation.clamp(min=1e-3) + 1e-4)


class ARolloutCountsOncePerSegment(Fault):
    """A response of several sequences counts as often in its group."""

    run, rule, changes_a_run = "qwen3", "advantages", False

    @staticmethod
    @in_place_of("anytron.algorithms.advantages:_of_responses", role="driver")
    def per_sequence(original, batch, *arguments):
        return original(replace(batch, responses=None), *arguments)


class GaeRunsThroughToolOutput(Fault):
    """Estimates run over all tokens of a row, also those that an environment wrote."""

    run, rule, changes_a_run = "critic", "advantages", False

    @staticmethod
    @in_place_of("anytron.algorithms.advantages:gae", role="driver")
    def everywhere(original, token_rewards, values, lengths, response_mask, **named):
        found = original(token_rewards, values, lengths, torch.ones_like(response_mask), **named)
        return found * response_mask


class ValueAfterTheEndTokenNotZero(Fault):
    """The value after the last token of a response is the last value, and not zero."""

    run, rule = "critic", "advantages"

    @staticmethod
    @in_place_of("anytron.algorithms.advantages:gae", role="driver")
    def with_value(original, token_rewards, values, lengths, response_mask, **named):
        rewards, start = token_rewards.clone(), 0
        for length in lengths.tolist():
            places = response_mask[start : start + length].nonzero().flatten()
            if places.numel():
                rewards[start + places[-1]] += named["gamma"] * values[start + places[-1]]
            start += length
        return original(rewards, values, lengths, response_mask, **named)


def in_both(*targets):
    """Mark a function that takes the place of others in training ranks and in the driver."""

    def mark(function):
        return in_place_of(*targets, role="driver")(in_place_of(*targets)(function))

    return mark


class KlGradientWithoutItsSamplingPart(Fault):
    """The KL term's gradient lacks the part through the policy's own log-prob."""

    run, rule = "qwen3", "loss"

    @staticmethod
    @in_both("anytron.algorithms.policy_loss:KL_ESTIMATORS")
    def detached(original):
        def k3(log_probs, reference):
            ratio = reference - log_probs
            return torch.expm1(ratio.detach()) - ratio

        return {**original, "k3": k3}


class DualClipOptionNotPassedOn(Fault):
    """The loss does not get the constant of the dual clip."""

    run, rule = "dual-clip", "loss"

    @staticmethod
    @in_both("anytron.algorithms.losses:clipped")
    def without(original, ratio, advantages, algorithm):
        return original(ratio, advantages, algorithm.model_copy(update={"dual_clip": None}))


class KlLossSubtracted(Fault):
    """The KL term is subtracted from the loss that is minimised."""

    run, rule = "qwen3", "loss"

    @staticmethod
    @in_both(f"{POLICY}:PolicyLoss.__call__")
    def subtracted(original, self, outputs, batch):
        negative = self.algorithm.model_copy(update={"kl_coefficient": self.algorithm.kl_coefficient})
        found = original(replace(self, algorithm=negative), outputs, batch)
        plain = original(replace(self, algorithm=negative.model_copy(update={"kl_coefficient": 0.0})), outputs, batch)
        return replace(found, loss=2.0 * plain.loss - found.loss)


class ToolOutputTokensInTheLoss(Fault):
    """The loss counts every token of a conversation, and not only what the policy wrote."""

    run, rule, changes_a_run = "qwen3", "loss", False

    @staticmethod
    @in_both(f"{POLICY}:PolicyLoss.__call__")
    def everywhere(original, self, outputs, batch):
        weight = batch.loss_weights.amax()
        every = torch.ones_like(batch.response_mask)
        return original(self, outputs, replace(batch, response_mask=every, loss_weights=weight.expand(every.shape)))


class EachRankDividesByItsOwnTokens(Fault):
    """Each micro-batch's loss is a mean over its own tokens, and the mean of these means is taken."""

    run, rule = "qwen3", "loss"

    @staticmethod
    @in_both(f"{POLICY}:PolicyLoss.__call__")
    def by_own(original, self, outputs, batch):
        share = batch.loss_weights.sum()
        count = batch.response_mask.sum().clamp(min=1)
        even = torch.where(batch.response_mask, 1.0 / count, 0.0) * (share > 0)
        return original(self, outputs, replace(batch, loss_weights=even))


class SftLossMaskSlicedFromTheWrongEnd(Fault):
    """The mask of supervised fine-tuning is one token late."""

    run, rule = "sft", "loss"

    @staticmethod
    @in_both("anytron.algorithms.losses:SupervisedLoss.__call__")
    def late(original, self, outputs, batch):
        fields = ("response_mask", "loss_weights", "token_shares")
        return original(self, outputs, replace(batch, **{name: getattr(batch, name).roll(1) for name in fields}))


class MaskedCompletionsInTheDivisor(Fault):
    """The sum is divided by the number of tokens before truncated rows were masked."""

    run, rule = "qwen3", "loss"

    @staticmethod
    @in_place_of("anytron.run.trainer.updates:loss_weights", role="driver")
    def by_all(original, counts, *arguments, **named):
        return original(counts, *arguments, **named) * 0.8


class SharedTurnsTrainedOncePerBranch(Fault):
    """The tokens of a turn that several rows share count in each of them."""

    run, rule, changes_a_run = "qwen3", "loss", False

    @staticmethod
    @in_place_of("anytron.run.trainer.updates:loss_weights", role="driver")
    def each(original, counts, aggregation, length=1, responses=None):
        found = original(counts, aggregation, length, responses)
        return found if responses is None else found * 1.5


class PaddingAdvantagesInTheSequenceMean(Fault):
    """A response's mean counts tokens that are not its own."""

    run, rule = "gspo", "loss"

    @staticmethod
    @in_both("anytron.algorithms.contract:PolicyTokens.sequence_mean")
    def over_all(original, self, values):
        every = values.new_zeros(self.num_sequences).index_add(0, self.sequence, torch.ones_like(values))
        return self.sequence_sum(values) / every.clamp(min=1.0)


class GradientsClearedBetweenPartsOfABatch(Fault):
    """The gradients of earlier micro-batches are cleared before each one."""

    run, rule = "qwen3", "packed-equals-padded"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:forward_backward")
    def last_only(original, chunks, micro_batches, *arguments):
        parts = []
        for micro_batch in micro_batches:
            for chunk in chunks:
                chunk.module.zero_grad_buffer()
            parts += original(chunks, [micro_batch], *arguments)
        return parts
