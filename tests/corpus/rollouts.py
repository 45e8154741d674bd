"""Rollout engines that sample, report or remember something else than what training takes them to."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.corpus.fault import ENDS, Fault, in_place_of

GENERATE = "anytron_rollout.transformers_engine:generate"
ENGINE = "anytron_rollout.transformers_engine:TransformersEngine"
LOAD = "anytron_rollout.transformers_engine:load_verified"
DRAWS = "anytron.workers.engines.sampling:TokenDraws"


def with_log_probs(responses, change):
    return [replace(one, log_probs=tuple(map(change, one.log_probs))) for one in responses]


class LogprobsDividedByTemperatureAfterSoftmax(Fault):
    """The log-probs of the drawn tokens are divided by the temperature in place of the logits."""

    run, rule = "qwen3", "rollout-equals-training"

    @staticmethod
    @in_place_of(GENERATE, role="rollout")
    def generate(original, model, requests, *arguments, **named):
        temperature = requests[0].sampling.temperature
        return with_log_probs(original(model, requests, *arguments, **named), lambda one: one / temperature)


class RolloutLogprobsStoredInBfloat16(Fault):
    """The rollout's log-probs are rounded to bfloat16 on their way to training."""

    run, rule = "qwen3", "rollout-equals-training"

    @staticmethod
    @in_place_of(GENERATE, role="rollout")
    def generate(original, *arguments, **named):
        return with_log_probs(original(*arguments, **named), lambda one: torch.tensor(one).bfloat16().item())


class FirstLogprobOfThePositionRecorded(Fault):
    """Each drawn token gets the log-prob of the most probable one."""

    run, rule = "qwen3", "rollout-equals-training"

    @staticmethod
    @in_place_of(f"{DRAWS}.__call__", role="rollout")
    def draw(original, self, scores, place):
        drawn, log_probs = original(self, scores, place)
        best = (scores.float() / self._sampling.temperature).log_softmax(-1).amax(-1)
        return drawn, best.to(log_probs.dtype)


class TrainerLogprobsWithoutTemperature(Fault):
    """Training does not divide the logits by the temperature when it computes log-probs again."""

    run, rule = "qwen3", "hf-log-probs"

    @staticmethod
    @in_place_of("anytron.device.hooks.facade:Hooks.log_prob_kernel")
    def kernel(original, self, spec):
        score = original(self, spec)
        return lambda hidden, weight, labels, temperature, group: score(hidden, weight, labels, 1.0, group)


class KernelReadsAStaleTransposedCopy(Fault):
    """Linear layers keep a transposed copy of their weight from the first call."""

    run, rule = "qwen3", "rollout-follows-updates"

    @staticmethod
    @in_place_of("torch.nn:Linear.forward", role="rollout")
    def forward(original, self, values):
        if not hasattr(self, "kept"):
            self.kept = self.weight.detach().t().clone()
        return values @ self.kept if self.bias is None else values @ self.kept + self.bias


class WeightSyncBehindTheCacheFlag(Fault):
    """New weights are sent to the rollout engine only if an option frees its cache."""

    run, rule = "qwen3", "rollout-follows-updates"

    @staticmethod
    @in_place_of(LOAD, role="rollout")
    def load(original, model, weights):
        if getattr(model, "has_weights", False):
            for _ in weights:
                pass
            return
        original(model, weights)
        model.has_weights = True


class LayersAbsentFromAChunkRestoredToOld(Fault):
    """After each chunk of a transfer, layers that it does not name get their old weights again."""

    run, rule = "qwen3", "rollout-follows-updates"

    @staticmethod
    @in_place_of(LOAD, role="rollout")
    def load(original, model, weights):
        old = {name: value.clone() for name, value in model.state_dict().items()} if weights.version else {}
        original(model, weights)
        for name, value in model.state_dict().items():
            if name in old and "layers.0." in name:
                value.copy_(old[name])


class BuffersNotSentWithTheWeights(Fault):
    """Buffers that training changes, such as a router's bias, stay as they were."""

    run, rule = "mla", "rollout-follows-updates"

    @staticmethod
    @in_place_of(LOAD, role="rollout")
    def load(original, model, weights):
        old = {name: value.clone() for name, value in model.named_buffers()} if weights.version else {}
        original(model, weights)
        for name, value in model.named_buffers():
            if name in old and name.endswith("e_score_correction_bias"):
                value.copy_(old[name])


class ResultsInOrderOfCompletion(Fault):
    """Results come in the order in which they ended, and are paired with other prompts."""

    run, rule = "qwen3", "rollout-equals-training"

    @staticmethod
    @in_place_of(f"{ENGINE}._generate", role="rollout")
    def generate(original, self, requests, version):
        return sorted(original(self, requests, version), key=lambda one: len(one.tokens))


class EngineSeedUsedForEachRequest(Fault):
    """All copies of a prompt draw with the seed of the engine, and get the same answer."""

    run, rule = "qwen3", "samples-of-a-prompt"

    @staticmethod
    @in_place_of(GENERATE, role="rollout")
    def generate(original, model, requests, *arguments, **named):
        return original(model, [replace(one, seed=1) for one in requests], *arguments, **named)


class OnlyOneEndTokenKnown(Fault):
    """The engine stops at an end token, and the tokens after it count as the response."""

    run, rule, says = "qwen3", ENDS, "it goes on after an end token"

    @staticmethod
    @in_place_of("anytron_rollout.generation:TokenSampler.responses", role="rollout")
    def responses(original, self, sequences, version):
        self.stopping.ends = torch.zeros_like(self.stopping.ends)
        return original(self, sequences, version)
