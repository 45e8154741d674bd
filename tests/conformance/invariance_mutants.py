"""Kernels that claim to be company-invariant, and compute right numbers whose bits depend on the rest of the call.

Each changes the order of a sum, or a formula, by itself: what a library does differs from machine to machine.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch
from torch.nn import functional

from anytron.kernels import fused, invariant
from anytron.kernels import log_prob as log_prob_module
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName
from anytron.kernels.log_prob import make_log_prob
from tests.conformance.kernel_mutant import KernelMutant
from tests.conformance.kernel_mutants import replacing


def claims(kernel):
    """Say that a kernel is company-invariant."""
    kernel.invariant = True
    return kernel


def claiming(name, function):
    """Make ``fused`` of a platform: one kernel that claims to be company-invariant."""
    return replacing(name, claims(function))


def biased(product, bias):
    return product if bias is None else product + bias


def in_halves(x, weight):
    """A product as the sum of two, over halves of K."""
    middle = x.shape[-1] // 2
    return functional.linear(x[..., :middle], weight[:, :middle]) + functional.linear(
        x[..., middle:], weight[:, middle:]
    )


class SplitsKByTheRows(KernelMutant):
    rule, says = "invariant-products", "the first of 1000 rows, in a call of 1 rows"
    fused = claiming(
        KernelName.LINEAR,
        lambda x, weight, bias: biased(
            invariant.linear(x, weight, None) if x.numel() < 16 * x.shape[-1] else in_halves(x, weight), bias
        ),
    )


class ColumnTilesByTheEntries(KernelMutant):
    rule, says = "invariant-products", "without the weight's other rows"
    fused = claiming(
        KernelName.LINEAR,
        lambda x, weight, bias: biased(
            invariant.linear(*((x, weight) if len(weight) < 256 else (x.flip(-1), weight.flip(-1))), None), bias
        ),
    )


class LastRowByAnotherFormula(KernelMutant):
    rule, says = "invariant-products", "the first of 1000 rows, in a call of 1 rows"

    @staticmethod
    def multiply(x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        last = (rows[-1:].float() * weight.float()).sum(-1).to(x.dtype)[None]
        product = torch.cat([invariant.linear(rows[:-1], weight, None), last])
        return biased(product.view(*x.shape[:-1], len(weight)), bias)

    fused = claiming(KernelName.LINEAR, multiply.__func__)


class AddsInTheOrderOfArrival(KernelMutant):
    """Adds up quarters of K with the quarter first that is ready first, as atomic additions do."""

    rule, says = "invariant-products", "The result depends on what else is in the call"

    @staticmethod
    def multiply(x, weight, bias, calls=itertools.count()):  # noqa: B008 - it counts the calls
        first = next(calls) % 4
        quarters = [*zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)]
        parts = [functional.linear(*quarter).float() for quarter in quarters[first:] + quarters[:first]]
        return biased(sum(parts[1:], parts[0]).to(x.dtype), bias)

    fused = claiming(KernelName.LINEAR, multiply.__func__)


class RowTilesByTheBatch(KernelMutant):
    """Multiplies whole tiles of rows in one way, and the rest in another."""

    rule, says = "invariant-products", "grouped_mm, 64 x 300, float32"

    @staticmethod
    def multiply(x, weights, splits):
        def product(rows, weight):
            whole = len(rows) // 64 * 64
            return torch.cat([in_halves(rows[:whole], weight), invariant.linear(rows[whole:], weight, None)])

        return torch.cat([product(rows, weight) for rows, weight in zip(x.split(list(splits)), weights, strict=True)])

    fused = claiming(KernelName.GROUPED_MM, multiply.__func__)


def attending(operator):
    """Make ``attention`` of a platform: the neutral kernel, with an operator that is called as torch's."""

    def attention(self, spec):
        kernel = make_attention(spec, operator)
        return claims(lambda *operands: kernel(*operands))  # noqa: PLW0108 - the kernel takes no attribute

    return attention


class SplitsKeysByTheLength(KernelMutant):
    rule, says = "invariant-attention", "without those after them"

    @staticmethod
    def operator(query, key, value, **settings):
        with mock.patch.object(invariant, "KEYS", 64 if key.shape[2] <= 256 else 128):
            return invariant.attention(query, key, value, **settings)

    attention = attending(operator.__func__)


def with_mask(change):
    """Make an operator that gets the mask of each call: ``change(attend, query, key, value, mask)``."""

    def operator(query, key, value, attn_mask=None, is_causal=False, **settings):
        if attn_mask is None:
            attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
            attn_mask = (attn_mask.tril() if is_causal else attn_mask)[None, None]

        def attend(query, key, value, mask):
            return invariant.attention(query, key, value, attn_mask=mask, **settings)

        return change(attend, query, key, value, attn_mask)

    return operator


class CountsKeysFromTheLast(KernelMutant):
    rule, says = "invariant-attention", "without those after them"

    @staticmethod
    def change(attend, query, key, value, mask):
        front = -key.shape[2] % invariant.KEYS
        key, value = (functional.pad(one, (0, 0, front, 0)) for one in (key, value))
        mask = mask.expand(*mask.shape[:-1], key.shape[2] - front)
        return attend(query, key, value, functional.pad(mask, (front, 0)))

    attention = attending(with_mask(change.__func__))


class AddsInTheOtherOrder(KernelMutant):
    """Begins with the last keys if there are several sequences."""

    rule, says = "invariant-attention", "without those after them"

    @staticmethod
    def change(attend, query, key, value, mask):
        if len(query) < 3:
            return attend(query, key, value, mask)
        mask = mask.expand(*mask.shape[:-1], key.shape[2])
        return attend(query, key.flip(2), value.flip(2), mask.flip(-1))

    attention = attending(with_mask(change.__func__))


class CacheInAnotherType(KernelMutant):
    """Has keys in 16 bits where queries are fewer than keys, as in decoding."""

    rule, says = "invariant-attention", "as the only queries"

    @staticmethod
    def change(attend, query, key, value, mask):
        return attend(query, key.bfloat16().to(key.dtype) if query.shape[2] < key.shape[2] else key, value, mask)

    attention = attending(with_mask(change.__func__))


class DecodesByAFormulaOfItsOwn(KernelMutant):
    """Divides by the sum of weights before it adds up the values, where there is one query."""

    rule, says = "invariant-attention", "tokens, as the only queries"

    @staticmethod
    def operator(query, key, value, **settings):
        if query.shape[2] > 1:
            return invariant.attention(query, key, value, **settings)
        shared = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(shared, 1).float() for one in (key, value))
        scores = query.float() @ key.transpose(-1, -2) * settings["scale"]
        if (mask := settings["attn_mask"]) is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value).to(query.dtype)

    attention = attending(operator.__func__)


def tiled(width):
    """Make ``log_probs`` of a platform: the neutral kernel, with tiles as wide as a function of call and spec says."""

    def log_probs(self, spec):
        kernel = make_log_prob(spec)

        def scored(hidden, *others):
            with mock.patch.object(log_prob_module, "_INVARIANT_WIDTH", width(len(hidden), spec)):
                return kernel(hidden, *others)

        return claims(scored)

    return log_probs


class TilesByTheTokens(KernelMutant):
    rule, says = "invariant-log-prob", "50000 entries, 64 wide, float32"
    log_probs = tiled(lambda tokens, spec: 4096 if tokens < 64 else 2048)


class TilesByTheLimit(KernelMutant):
    rule, says = "invariant-log-prob", "with chunk_tokens of 16 instead of 1024"
    log_probs = tiled(lambda tokens, spec: 4 * max(512, spec.chunk_tokens))


class ScoresTheLastTokensByAnotherFormula(KernelMutant):
    rule, says = "invariant-log-prob", "301 entries, 1024 wide, float32"

    def log_probs(self, spec):
        kernel = make_log_prob(spec)

        def scored(hidden, weight, labels, temperature, group):
            log_probs, entropy = kernel(hidden, weight, labels, temperature, group)
            rest = slice(len(hidden) // 16 * 16, len(hidden))
            logits = (hidden[rest] @ weight[: spec.vocab_size].T).double() / temperature
            chosen = logits.log_softmax(-1).gather(-1, labels[rest].clamp(min=0)[:, None])[:, 0].float()
            chosen = chosen.masked_fill(labels[rest] < 0, 0.0)
            return torch.cat([log_probs[: rest.start], chosen]), entropy

        return claims(scored)


class NormsInChunks(KernelMutant):
    """Adds up squares in four parts where there are few rows."""

    rule, says = "invariant-rows", "rms_norm, 63 wide, float32"

    @staticmethod
    def norm(x, weight, eps, zero_centered):
        if x.shape[:-1].numel() >= 16:
            return fused.rms_norm(x, weight, eps, zero_centered)
        total = sum(part.square().sum(-1, keepdim=True) for part in x.float().chunk(4, -1))
        factor = 1 + weight.float() if zero_centered else weight.float()
        return (x.float() * torch.rsqrt(total / x.shape[-1] + eps) * factor).to(x.dtype)

    fused = claiming(KernelName.RMS_NORM, norm.__func__)


class GatesTheRestByAnotherFormula(KernelMutant):
    """Computes what no vector of 16 numbers fills with another formula for SiLU."""

    rule, says = "invariant-rows", "swiglu, 63 wide, float32"

    @staticmethod
    def gated(x):
        gate, up = (one.reshape(-1) for one in x.chunk(2, -1))
        rest = gate.numel() // 16 * 16
        end = gate[rest:].float()
        silu = torch.cat([functional.silu(gate[:rest]), (end / (1 + torch.exp(-end))).to(x.dtype)])
        return (silu * up).view(*x.shape[:-1], x.shape[-1] // 2)

    fused = claiming(KernelName.SWIGLU, gated.__func__)


class SplitsKOfManyRows(KernelMutant):
    """Multiplies more rows than any rule of a single kernel has in another way."""

    rule, says = "invariant-model", "the last of 1000 sequences in one call"
    fused = claiming(
        KernelName.LINEAR,
        lambda x, weight, bias: biased(
            invariant.linear(x, weight, None) if x.shape[:-1].numel() <= 1000 else in_halves(x, weight), bias
        ),
    )


class HasNoBackwardPass(KernelMutant):
    rule, says = "invariant-values", "The gradient of the input is missing"
    fused = claiming(KernelName.LINEAR, lambda x, weight, bias: invariant.linear(x.detach(), weight, bias))


class ForgetsToSaySo(KernelMutant):
    """Has a kernel that is company-invariant, and answers with it as with any other."""

    rule, says = "invariant-products", "must say so: its attribute invariant is True"
    fused = replacing(KernelName.LINEAR, invariant.linear)


RULES_OF_VALUES = {
    "attention": ("attention-packed", "attention-padded"),
    "log_probs": ("log-probs", "log-probs-chunks"),
    "fused": ("linear", "rms-norm", "swiglu", "grouped-mm"),
}
"""Rules about the values of the kernels that a mutant may have: those of :data:`RULES_OF_BITS` keep them."""
RULES_OF_BITS = ("invariant-products", "invariant-attention", "invariant-log-prob", "invariant-rows", "invariant-model")
