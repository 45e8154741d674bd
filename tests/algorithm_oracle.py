"""Policy losses in float64, sequence by sequence and token by token, written from the papers; nothing of Anytron."""

from __future__ import annotations

import torch


def clip_term(ratio, advantage, low, high, dual=None):
    """PPO's term of one token (arXiv:1707.06347, eq. 7) with two bounds (arXiv:2503.14476, eq. 10), and dual clip."""
    surrogate = min(ratio * advantage, max(min(ratio, 1 + high), 1 - low) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)  # arXiv:1912.09729, eq. 5
    return -surrogate


def ppo_clip(new, old, advantages, s):
    return [
        clip_term(torch.exp(p - q), a, s["clip_low"], s["clip_high"], s.get("dual_clip"))
        for p, q, a in zip(new, old, advantages, strict=True)
    ]


def sequence_ratio(new, old):
    """arXiv:2507.18071, eq. 7."""
    total = 0.0
    for p, q in zip(new, old, strict=True):
        total = total + (p - q)
    return torch.exp(total / len(new))


def gspo(new, old, advantages, s):
    ratio = sequence_ratio(new, old)
    return [clip_term(ratio, a, s["clip_low"], s["clip_high"], s.get("dual_clip")) for a in advantages]


def gspo_token(new, old, advantages, s):
    """arXiv:2507.18071, eq. 14: ``sg[s_i] * p / sg[p]``."""
    ratio = sequence_ratio(new, old).detach()
    return [
        clip_term(ratio * torch.exp(p) / torch.exp(p).detach(), a, s["clip_low"], s["clip_high"], s.get("dual_clip"))
        for p, a in zip(new, advantages, strict=True)
    ]


def cispo(new, old, advantages, s):
    """arXiv:2506.13585, eq. 4 and 5."""
    losses = []
    for p, q, a in zip(new, old, advantages, strict=True):
        weight = max(min(float(torch.exp(p - q).detach()), 1 + s["clip_high"]), 1 - s["clip_low"])
        losses.append(-weight * a * p)
    return losses


def sapo(new, old, advantages, s):
    """arXiv:2511.20347, eq. 5 and 6."""
    losses = []
    for p, q, a in zip(new, old, advantages, strict=True):
        tau = s["sapo_tau_positive"] if a > 0 else s["sapo_tau_negative"]
        losses.append(-(4 / tau) / (1 + torch.exp(-tau * (torch.exp(p - q) - 1))) * a)
    return losses


LOSSES = {"ppo_clip": ppo_clip, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo}


def factors(old, drawn, s):
    """Importance factors of one sequence's tokens, constants: of each token, or of all of them together."""
    weights = [float(torch.exp(p - q).detach()) for p, q in zip(old, drawn, strict=True)]
    if s.get("importance_level") == "sequence":
        product = 1.0
        for weight in weights:
            product *= weight
        weights = [product] * len(weights)
    cap, floor = s.get("importance_cap", 2.0), s.get("importance_floor", 0.0)
    if s.get("importance_correction") == "truncated":
        return [min(weight, cap) for weight in weights]
    if s.get("importance_correction") == "masked":
        return [weight if floor <= weight <= cap else 0.0 for weight in weights]
    return [1.0] * len(weights)


def aggregate(sequences, s):
    """One loss of lists of token losses, one list per sequence; some may be empty."""
    answered = [tokens for tokens in sequences if tokens]
    flat = [loss for tokens in answered for loss in tokens]
    if s["aggregation"] == "token-mean":
        return sum(flat) / len(flat)
    if s["aggregation"] == "sequence-mean":
        return sum(sum(tokens) / len(tokens) for tokens in answered) / len(answered)
    if s["aggregation"] == "token-sum":
        return sum(flat)
    return sum(flat) / s["length_constant"] / len(sequences)


def divergence(name, p, q):
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html) of KL(p || q)."""
    return {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": torch.exp(q - p) - 1 - (q - p)}[name]


def policy_loss(batch, log_probs, entropy, settings):
    """The whole loss of a mini-batch, differentiable.

    Args:
        batch: A RaggedBatch: its lengths, response mask, log-probs and advantages are read.
        log_probs: float64 ``[T]``.
        entropy: float64 ``[T]``.
        settings: Keys of ``algorithm``, with defaults filled in.
    """
    s = settings
    sequences, start = [], 0
    for length in batch.lengths.tolist():
        own = [token for token in range(start, start + length) if batch.response_mask[token]]
        start += length
        new = [log_probs[token] for token in own]
        before = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs.double()
        old = [before[token] for token in own]
        advantages = [float(batch.advantages[token]) for token in own]
        losses = LOSSES[s["loss"]](new, old, advantages, s) if own else []
        if own and s.get("importance_correction", "none") not in ("none", "auto", "measured"):
            drawn = [batch.rollout_log_probs[token].double() for token in own]
            losses = [loss * factor for loss, factor in zip(losses, factors(old, drawn, s), strict=True)]
        for place, token in enumerate(own):
            losses[place] = losses[place] - s["entropy_coefficient"] * entropy[token]
            if s["kl_coefficient"] and s.get("kl_placement", "loss") == "loss":
                reference = batch.reference_log_probs[token].double()
                kl = divergence(s["kl_estimator"], new[place], reference)
                losses[place] = losses[place] + s["kl_coefficient"] * kl
        sequences.append(losses)
    return aggregate(sequences, s)
