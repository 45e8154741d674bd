"""Samplers that draw from another distribution than the log-probs that they report."""

from __future__ import annotations

from dataclasses import replace

from tests.corpus.fault import Fault, in_place_of

DRAW = "anytron.workers.engines.sampling:TokenDraws.__call__"


class DraftTokensAlwaysAccepted(Fault):
    """Each token is a draft that is accepted without a test; the draft's distribution is that of the token before."""

    run, rule = "qwen3", "token-frequencies"

    @staticmethod
    @in_place_of(DRAW, role="rollout")
    def accept(original, self, logits, positions):
        draft, self.draft = getattr(self, "draft", logits), logits
        tokens, _ = original(self, draft, positions)
        log_probs = (logits / self._sampling.temperature).log_softmax(-1)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


class PenaltyDoesNotSeeGeneratedTokens(Fault):
    """The sampler, which has no penalty in Anytron, counts no generated token, and bars end tokens for ever."""

    run, rule = "no-empty-response", "token-frequencies"

    @staticmethod
    @in_place_of(DRAW, role="rollout")
    def without_history(original, self, logits, positions):
        sampling = self._sampling
        self._sampling = replace(sampling, min_new_tokens=1 << 30) if sampling.min_new_tokens else sampling
        try:
            return original(self, logits, positions)
        finally:
            self._sampling = sampling
