"""Orders, counts, learning rates and states that are wrong over several steps and right in each."""

from __future__ import annotations

from tests.corpus.fault import Fault, in_place_of


class AccumulationCountFlooredBeforeTheProduct(Fault):
    """The number of micro-batches of an update is rounded down, so that the optimizer steps before the last ones."""

    run, rule = "uneven", "packed-equals-padded"

    @staticmethod
    @in_place_of("anytron.run.trainer.updates:UpdatePlan.micro_batches", role="driver")
    def floored(original, self, batch, dp_size):
        parts = original(self, batch, dp_size)
        micro = self.max_tokens // int(batch.lengths.max())
        return [share[: max(1, batch.num_sequences // micro // dp_size)] for share in parts]


class WarmupSubtractedTwice(Fault):
    """The schedule, which subtracts the warm-up from the steps of the decay itself, gets the steps without it."""

    run, rule = "warm-up", "learning-rates"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:OptimizerParamScheduler.__init__")
    def twice(original, self, *arguments, lr_warmup_steps, lr_decay_steps, **named):
        steps = {"lr_warmup_steps": lr_warmup_steps, "lr_decay_steps": lr_decay_steps - lr_warmup_steps}
        original(self, *arguments, **steps, **named)


class OptimizerNotRestoredOnResume(Fault):
    """A resume restores the weights, and begins with new moments at the start of the schedule."""

    run, rule, changes_a_run = "qwen3", "resumed-equals-continued", False  # the run has no interruption

    @staticmethod
    @in_place_of("anytron_megatron.checkpoint.checkpoints:prepare_state")
    def without_moments(original, optimizer, steps):
        original(optimizer, 0)

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:TrainedModel.continue_from")
    def at_the_start(original, self, updates, schedule_steps):
        original(self, updates, 0)


class SameOrderInEachEpoch(Fault):
    """The order of each epoch is that of the first."""

    run, rule = "few-prompts", "prompt-order"

    @staticmethod
    @in_place_of("anytron.task.data.mixture:EpochSampler._order_of", role="driver")
    def first(original, self, epoch):
        return original(self, 0)
