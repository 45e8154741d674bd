"""The protocols of rollout engines, and what goes in and out of them.

As with :mod:`anytron.workers.engines.training_engine`: :class:`RolloutEngine` is what every engine needs, and what some
can do besides is a separate protocol and capability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.task.data.images import ImagePatches
    from anytron.task.environments.protocol import Outcome
    from anytron.workers.engines.device_memory import MemoryUse
    from anytron.workers.weights.transfer import WeightOrigin

StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class PromptInputs:
    """What responses are generated for.

    Attributes:
        tokens: Token ids, at least one; as many image tokens as the model makes of the images.
        images: The prompt's images; None without.
    """

    tokens: tuple[int, ...]
    images: ImagePatches | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; fields as in ``rollout`` of the configuration, token ids resolved."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """One response that is to be made.

    Attributes:
        id: The driver's number, unique among those that an engine holds.
        prompt: The prompt.
        sampling: Sampling parameters.
        seed: Seed of this response alone, in ``[0, 2**63)``: its tokens depend neither on other requests of its
            batch nor on the engine that makes it, among engines of one kind. (Where rounding differs, as
            it does between batches of different shapes, a token may, once in about a million.)
    """

    id: int
    prompt: PromptInputs
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Response:
    """One response: a turn, as engines make it, or several turns with what an environment wrote in between.

    Attributes:
        tokens: All ids after the prompt, the end token included if there is one; may be empty.
        log_probs: Log-prob of each under the model at the sampling temperature, before top-p, top-k and the
            suppression of end tokens; 0 for those that an environment wrote.
        stop_reason: ``stop`` = an end token, a stop string or the environment ended it, ``length`` = a limit of length
            or of turns did, ``abort`` = :meth:`RolloutEngine.abort` did.
        versions: Version of the weights that made each token that the model wrote.
        routing: The experts of each token of prompt and response but the last (:class:`RoutingShape`), on
            the host, up to the last turn: what an environment wrote before it failed has none. None unless
            ``rollout.replay_routing`` asks for it.
        response_mask: For each token, whether the model wrote it; None = it wrote all of them.
        environment: The environment's outcome; None without one.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stop_reason: StopReason
    versions: tuple[int, ...]
    routing: Tensor | None = None
    response_mask: tuple[bool, ...] | None = None
    environment: Outcome | None = None

    @property
    def finished(self) -> bool:
        """Whether it came to its end, and no limit ended it."""
        return self.stop_reason == "stop"


class RolloutEngine(Protocol):
    """Generates responses, in a separate process.

    It works while it is polled. So a driver that polls several engines in turn has responses as they finish, and
    between two polls an engine can be given more requests or new weights, without threads in it.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, any number; return at once."""

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate, until a response has finished or about so much time is over.

        Returns:
            Number and response of each request that has finished since the last poll; each is given once. Nothing at
            once if there are no requests.

        Raises:
            EngineError: No weights have been loaded.
        """

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Cancel requests.

        Args:
            ids: Which; None = all that the engine holds. It passes over those that it does not hold.

        Returns:
            What there is of their responses, with the stop reason ``abort``.
        """

    def load_weights(self, origin: WeightOrigin) -> int:
        """Take new weights, verify them, and return the version now in use.

        The version before stays in use if nothing begins to arrive. After any later failure the engine has no
        weights: it refuses to generate until all weights have been given again.

        What is under way goes on with them.

        Raises:
            EngineError: A tensor is missing, unknown, or of another shape.
            TransferError: The weights did not arrive as they were sent.
        """

    def describe(self) -> Mapping[str, Any]:
        """Facts for the run's records: device, patches of this process, versions."""


class AdapterRollout(RolloutEngine, Protocol):
    """A rollout engine that computes with adapters by itself: capability ``adapters``.

    ``rollout.lora: alone`` needs it. The engine has read the weights of the model's directory then, and is given no
    others: :meth:`load_adapter` is called in the place of ``load_weights``.
    """

    def load_adapter(self, origin: WeightOrigin) -> int:
        """Take the adapters of ``model.lora``, under PEFT's names, and forget those before; return their version.

        In all else as ``load_weights``.

        Raises:
            EngineError: The engine cannot compute with them.
            TransferError: The weights did not arrive as they were sent.
        """


class ComparableRollout(RolloutEngine, Protocol):
    """A rollout engine that can be asked whether it has the weights that it was given: capability ``comparison``.

    ``rollout.check_weights_every`` needs it.
    """

    def differing_weights(self, origin: WeightOrigin) -> list[str]:
        """Compare the weights in use with others, bit for bit, and change nothing.

        Args:
            origin: The weights to compare with, which are cast as :meth:`load_weights` does.

        Returns:
            Names of those that differ, or that are on one side only.

        Raises:
            TransferError: The weights did not arrive as they were sent.
        """


class SleepingRollout(RolloutEngine, Protocol):
    """A rollout engine that can leave its device to training ranks: capability ``sleep``.

    ``rollout.sleep`` needs it.
    """

    def sleep(self) -> MemoryUse:
        """Free the device's memory. The engine then has no weights and no requests; ``load_weights`` wakes it."""


class ObservableRollout(RolloutEngine, Protocol):
    """A rollout engine whose computation can be compared with others: capability ``observation``."""

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute whole logits of given sequences, each by itself and without padding.

        Returns:
            float32 ``[L, V]`` host tensors, row t after token t, untouched by any temperature. Each row may have any
            constant added: an engine may answer with the log-softmax.
        """


@dataclass(frozen=True)
class RoutingShape:
    """The experts to which a model sends tokens: a rollout engine reports them, and a training engine repeats them.

    One row for each token of prompt and response *but the last*: no engine computes the token that ends a sequence, and
    nothing that is learnt depends on where it goes. Legend: T tokens, L mixture-of-experts layers, K experts of a
    token.

    Attributes:
        layers: L, those with a router, from the first to the last of the model.
        chosen: K.
        experts: How many a layer has; a choice is one of their numbers, from 0.
    """

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds the numbers."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    def mistake_in(self, routing: Tensor | None, tokens: int) -> str | None:
        """Return what is wrong with the routing ``[tokens - 1, L, K]`` of a sequence; None if nothing is."""
        if routing is None:
            return "it has no routing"
        expected = (tokens - 1, self.layers, self.chosen)
        if tuple(routing.shape) != expected or routing.dtype is not self.dtype:
            return f"its routing is {routing.dtype} {tuple(routing.shape)}, expected {self.dtype} {expected}"
        if not routing.numel():
            return None
        low, high = (int(value) for value in routing.aminmax())
        if low < 0 or high >= self.experts:
            return f"its routing names expert {high if high >= self.experts else low} of {self.experts}"
        ordered = routing.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            return "its routing sends a token to one expert twice"
        return None
