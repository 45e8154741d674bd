"""The rule of a whole company-invariant model: generation and training give a token the same log-prob, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron.kernels.contract import AttentionCall, KernelName, KernelSpec, LogProbSpec
from anytron_conformance.compare import assert_same_bits
from anytron_conformance.kernels.attention_calls import Layer, Packing
from anytron_conformance.kernels.comparison import drawn, in_dtypes
from anytron_conformance.rules import Case, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron_conformance.subject import Subject

WIDTH, HIDDEN, ENTRIES, LAYERS = 1024, 2048, 1000, 2
"""Features of a token and within a layer, entries of the vocabulary, and layers."""
ATTENTION = Layer(8, 2, 128, 128)
LENGTH = 97
"""Tokens of the sequence in whose company others are."""
EPS = 1e-6


@dataclass(frozen=True)
class Part:
    """Tokens of one sequence that are computed now.

    Attributes:
        tokens: int64 ``[n]``.
        cache: Keys and values ``[before, groups, D]`` of the tokens before them, in each layer; empty = none.
    """

    tokens: Tensor
    cache: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def before(self) -> int:
        """Number of tokens in the cache."""
        return len(self.cache[0][0]) if self.cache else 0


@dataclass(frozen=True)
class Found:
    """Results for a :class:`Part`.

    Attributes:
        numbers: float32 ``[n, 2]``: each token's log-prob of the vocabulary's next entry, and its entropy.
        cache: As :attr:`Part.cache`, with the part's tokens.
    """

    numbers: Tensor
    cache: tuple[tuple[Tensor, Tensor], ...]


class Decoder:
    """A decoder with grouped queries, of company-invariant kernels; its weights are random and its layers the same."""

    def __init__(self, subject: Subject, dtype: torch.dtype) -> None:
        device, hooks = subject.device, subject.hooks

        def weight(rows: int, columns: int, seed: int) -> Tensor:
            values: Tensor = drawn(rows, columns, seed=seed) / columns**0.5
            return values.to(device, dtype)

        spec = KernelSpec(device.type, dtype, invariant=True)
        options = {"eps": EPS, "zero_centered": False}
        self._linear, self._swiglu, self._rope = (
            hooks.fused_kernel(name, spec) for name in (KernelName.LINEAR, KernelName.SWIGLU, KernelName.ROPE)
        )
        self._norm = hooks.fused_kernel(KernelName.RMS_NORM, replace(spec, options=options))
        self._attend = ATTENTION.kernel(subject, invariant=True)
        self._score = hooks.log_prob_kernel(LogProbSpec(ENTRIES, 1, 256, device.type, dtype, invariant=True))
        heads = ATTENTION.heads + 2 * ATTENTION.groups
        self._qkv, self._out = weight(heads * ATTENTION.size, WIDTH, 1), weight(WIDTH, WIDTH, 2)
        self._up, self._down = weight(2 * HIDDEN, WIDTH, 3), weight(WIDTH, HIDDEN, 4)
        self._embedding = (2 * drawn(ENTRIES, WIDTH, seed=5)).to(device, dtype)
        self._gain = torch.ones(WIDTH, device=device, dtype=dtype)
        self._angles = 100.0 ** -torch.linspace(0, 1, ATTENTION.size // 2, device=device).repeat(2)

    def packed(self, parts: Sequence[Part]) -> list[Found]:
        """Compute parts of several sequences in one packed call."""
        lengths = tuple(len(part.tokens) for part in parts)
        keys = tuple(part.before + len(part.tokens) for part in parts)
        call = Packing(lengths, keys).call("padding_causal", self._gain.device)
        tokens = torch.cat([part.tokens for part in parts])
        places = torch.cat(
            [torch.arange(last - n, last, device=tokens.device) for n, last in zip(lengths, keys, strict=True)]
        )
        caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
        x = self._embedding[tokens]
        for layer in range(LAYERS):
            query, key, value = self._project(x, places)
            for part, cache, *new in zip(parts, caches, key.split(lengths), value.split(lengths), strict=True):
                old = part.cache[layer] if part.cache else (key[:0], value[:0])
                cache.append((torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]])))
            key, value = (torch.cat([cache[layer][side] for cache in caches]) for side in (0, 1))
            x = self._rest(x, self._attend(query, key, value, call))
        numbers = self._numbers(x, tokens).split(lengths)
        return [Found(own, tuple(cache)) for own, cache in zip(numbers, caches, strict=True)]

    def padded(self, tokens: Tensor) -> Tensor:
        """Compute padded rows ``[B, S]``, in which a token sees those before it: ``[B, S, 2]``."""
        shape, call = tokens.shape, AttentionCall("bshd", "causal")
        places = torch.arange(shape[1], device=tokens.device).repeat(shape[0])
        x = self._embedding[tokens.flatten()]
        for _ in range(LAYERS):
            query, key, value = (one.view(*shape, *one.shape[1:]) for one in self._project(x, places))
            x = self._rest(x, self._attend(query, key, value, call).flatten(0, 1))
        return self._numbers(x, tokens.flatten()).view(*shape, 2)

    def _project(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self._linear(self._norm(x, self._gain, EPS, False), self._qkv, None).view(len(x), -1, ATTENTION.size)
        query, key, value = heads.split([ATTENTION.heads, ATTENTION.groups, ATTENTION.groups], dim=1)
        freqs = torch.outer(places.float(), self._angles)[:, None]
        return self._rope(query, freqs, False), self._rope(key, freqs, False), value

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self._linear(attended.reshape(len(x), -1), self._out, None)
        inner = self._swiglu(self._linear(self._norm(x, self._gain, EPS, False), self._up, None))
        found: Tensor = x + self._linear(inner, self._down, None)
        return found

    def _numbers(self, x: Tensor, tokens: Tensor) -> Tensor:
        hidden = self._norm(x, self._gain, EPS, False)
        return torch.stack(self._score(hidden, self._embedding, (tokens + 1) % ENTRIES, 1.0, None), dim=1)


def _batches(decoder: Decoder, own: Tensor, whole: Tensor) -> None:
    for count, place, first in ((2, "first", 0), (2, "last", 1), (33, "middle", 16), (1000, "last", 999)):
        others = [Part(own[-1 - number % (7 if count < 1000 else 1) :]) for number in range(count - 1)]
        beside = decoder.packed([*others[:first], Part(own), *others[first:]])[first]
        assert_same_bits(beside.numbers, whole, f"the {place} of {count} sequences in one call")
    lengths = (1, 2, 63, 64, 65, 96)
    for length, found in zip(lengths, decoder.packed([Part(own[:length]) for length in lengths]), strict=True):
        assert_same_bits(
            found.numbers, whole[:length], f"the first {length} of {LENGTH} tokens, without those after them"
        )


def _generation(decoder: Decoder, own: Tensor, whole: Tensor) -> None:
    for prompt, steps in ((1, 3), (61, 6), (LENGTH - 2, 2)):
        for count in (1, 5):
            # The others have prompts of other lengths, as in a batch of requests.
            starts = [prompt, *(max(1, (prompt + 13 * number) % (LENGTH - 6)) for number in range(1, count))]
            found = decoder.packed([Part(own[:start]) for start in starts])
            for step in range(steps):
                ends = [start + step for start in starts]
                parts = [Part(own[end : end + 1], one.cache) for end, one in zip(ends, found, strict=True)]
                found = decoder.packed(parts)
                words = f"token {ends[0] + 1}, decoded after a prompt of {prompt}, {count} sequences at a time"
                assert_same_bits(found[0].numbers, whole[ends[0] : ends[0] + 1], words)


def _rows(decoder: Decoder, own: Tensor, whole: Tensor) -> None:
    for count, length in ((1, LENGTH), (3, LENGTH + 40)):
        for place in {0, count - 1}:
            tokens = own.flip(0).repeat(2)[:length].repeat(count, 1)
            tokens[place, :LENGTH] = own
            found = decoder.padded(tokens)[place, :LENGTH]
            assert_same_bits(found, whole, f"row {place} of {count} padded rows of {length} tokens")


@rule(
    "invariant-model",
    "kernels",
    "A decoder of company-invariant kernels gives a token the same log-prob in every call, to the bit.",
    needs=(Feature.COMPANY_INVARIANCE, Feature.THD),
    cases=in_dtypes(
        (
            ("batches", _batches, ()),
            ("generation", _generation, ()),
            ("padded rows", _rows, (Feature.BSHD,)),
        )
    ),
)
def model(subject: Subject, case: Case) -> None:
    """Compute a sequence of 97 tokens alone, and compare bytes of log-probs and entropies with other calls.

    The model has two dense layers of width 1024 with 8 heads. The sequence is the first, the middle or the last of
    2, 33 and 1000 sequences; it is cut to prefixes, decoded token by token with cached keys, alone and beside others,
    computed in padded rows, and computed once more. A kernel breaks this rule alone if it depends on more rows than
    the other rules have, or on the order of calls. The modules of an engine are compared by ``anytron compare``.
    """
    dtype, check = case.values
    decoder = Decoder(subject, dtype)
    own = (torch.arange(LENGTH, device=subject.device) * 7919 + 11) % ENTRIES
    with torch.no_grad():
        whole = decoder.packed([Part(own)])[0].numbers
        assert_same_bits(decoder.packed([Part(own)])[0].numbers, whole, "the same call once more")
        check(decoder, own, whole)


RULES = (model,)
