"""The protocols of rollout engines, and their inputs and outputs.

Every engine implements :class:`RolloutEngine`. As with :mod:`anytron.workers.engines.training_engine`, each optional
ability is a separate protocol, and a capability that the engine declares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from anytron.base.packed import Packed, Runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.config.generation import RolloutSection
    from anytron.task.data.images import ImagePatches
    from anytron.task.environments.protocol import Outcome
    from anytron.workers.engines.device_memory import MemoryUse
    from anytron.workers.weights.transfer import WeightOrigin

StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class PromptInputs:
    """The inputs of a prompt for which responses are generated.

    Attributes:
        tokens: Token ids, at least one; each image token is repeated once for each embedding of its image.
        images: The prompt's images; None if it has no images.
    """

    tokens: tuple[int, ...]
    images: ImagePatches | None = None


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: the keys of the same names in the section ``rollout``, and token ids.

    Attributes:
        end_token_ids: Tokens that end a response.
        pad_token_id: Token in padding slots.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0

    @classmethod
    def from_config(
        cls, rollout: RolloutSection, *, end_token_ids: tuple[int, ...], pad_token_id: int
    ) -> SamplingParams:
        """Read the section ``rollout``.

        Args:
            rollout: The section.
            end_token_ids: Tokens that end a response.
            pad_token_id: Token in padding slots.
        """
        return cls(
            max_new_tokens=rollout.max_new_tokens,
            min_new_tokens=rollout.min_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            end_token_ids=end_token_ids,
            pad_token_id=pad_token_id,
        )


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response.

    Attributes:
        id: Number that the driver assigns, unique among the requests that an engine holds.
        prompt: The prompt.
        sampling: Sampling parameters.
        seed: Seed of this response alone, in ``[0, 2**63)``: the response's tokens depend neither on other
            requests of its batch nor on which of several replicas generates it. (Rounding differs between batches of
            different shapes, which changes about one token in a million.)
    """

    id: int
    prompt: PromptInputs
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Response:
    """One response: a single turn, as engines return it, or several turns with an environment's tokens in between.

    Attributes:
        tokens: All ids after the prompt, the end token included if there is one; may be empty.
        log_probs: Log-prob of each token under the model at the sampling temperature, before top-p, top-k and the
            suppression of end tokens; 0 for tokens of an environment. They are rounded to float32.
        stop_reason: What ended the response: ``stop`` = an end token, a stop string or the environment, ``length`` = a
            limit of length or of turns, ``abort`` = :meth:`RolloutEngine.abort`.
        versions: For each token that the model wrote: version of the weights that generated it.
        routing: The experts of each token of prompt and response except the last (:class:`RoutingShape`), on
            the host. Tokens that an environment wrote after the model's last turn have no routing. None unless
            ``rollout.replay_routing`` is set.
        response_mask: For each token, whether the model wrote it; None = the model wrote all of them.
        environment: The environment's outcome; None = no environment took part.
        prompt: Token ids of the prompt that an agent sent; None = the prompt that the response was requested for.
        images: The images that an agent sent, of which tokens are in ``prompt`` and ``tokens``; None = it sent none.
        others: Further conversations that an agent held for this response, each with its ``prompt``. Tokens that two
            conversations share are the model's in one of them only: where ``response_mask`` is true.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    stop_reason: StopReason
    versions: Sequence[int]
    routing: Tensor | None = None
    response_mask: Sequence[bool] | None = None
    environment: Outcome | None = None
    prompt: tuple[int, ...] | None = None
    images: ImagePatches | None = None
    others: tuple[Response, ...] = ()

    def __post_init__(self) -> None:
        """Pack the numbers: a driver holds millions of them."""
        packed: dict[str, Any] = {
            "tokens": Packed("i", self.tokens),
            "log_probs": Packed("f", self.log_probs),
            "versions": Runs(self.versions),
        }
        if self.response_mask is not None:
            packed["response_mask"] = Packed("b", self.response_mask)
        for name, numbers in packed.items():
            object.__setattr__(self, name, numbers)

    @property
    def version_runs(self) -> list[tuple[int, int]]:
        """(version, count) for each run of ``count`` adjacent tokens from weights of one version, in order."""
        assert isinstance(self.versions, Runs), "a response packs them"
        return self.versions.runs

    @property
    def finished(self) -> bool:
        """Whether the response is complete: neither cut off by a limit nor aborted."""
        return self.stop_reason == "stop"


def longer_routing(known: Tensor | None, told: Tensor | None) -> Tensor | None:
    """Return the routing of a conversation after a further turn.

    Tokens that the model wrote keep the experts with which it wrote them. A later turn reads these tokens again,
    possibly with other experts.

    Args:
        known: Routing of the conversation before; None before its first turn.
        told: Routing of the whole conversation, as the engine reported it with the turn; None = it reports none.
    """
    return told if known is None or told is None else torch.cat([known, told[len(known) :]])


class RolloutEngine(Protocol):
    """Generates responses, in a separate process.

    An engine works only while it is polled. A driver that polls several engines in turn gets responses as they finish,
    and between two polls it can submit more requests or load new weights. So an engine needs no threads.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, any number; return at once."""

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate until a response has finished or about the given time is over.

        Returns:
            Id and response of each request that has finished since the last poll; each is returned once. If the engine
            holds no requests, it returns an empty list at once.

        Raises:
            EngineError: No weights have been loaded.
        """

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Cancel requests.

        Args:
            ids: Ids of the requests; None = all that the engine holds. Unknown ids are ignored.

        Returns:
            Id of each cancelled request, and its response so far with the stop reason ``abort``.
        """

    def load_weights(self, origin: WeightOrigin) -> int:
        """Load new weights, verify them, and return the version now in use.

        If the transfer fails before it begins, the previous version stays in use. After any later failure the engine
        has no weights: it refuses to generate until all weights have been loaded again.

        Responses in progress continue with the new weights.

        Raises:
            EngineError: A tensor is missing or unknown, or its shape is not the model's.
            TransferError: The weights did not arrive as they were sent.
        """

    def describe(self) -> Mapping[str, Any]:
        """Return facts for the run's records: device, patches of this process, versions."""


class AdapterRollout(RolloutEngine, Protocol):
    """A rollout engine that can apply LoRA adapters itself: capability ``adapters``.

    ``rollout.lora: alone`` needs it. The engine then reads the weights from the model's directory and receives only
    adapters: :meth:`load_adapter` is called instead of ``load_weights``.
    """

    def load_adapter(self, origin: WeightOrigin) -> int:
        """Load the adapters of ``model.lora``, under PEFT's names, in place of the previous ones; return their version.

        Failed transfers and responses in progress are treated as by ``load_weights``.

        Raises:
            EngineError: The engine cannot apply the adapters.
            TransferError: The weights did not arrive as they were sent.
        """


class ComparableRollout(RolloutEngine, Protocol):
    """A rollout engine that can compare its weights with those that were sent: capability ``comparison``.

    ``rollout.check_weights_every`` needs it.
    """

    def differing_weights(self, origin: WeightOrigin) -> list[str]:
        """Compare the weights in use with sent weights, bit for bit, without changing them.

        Args:
            origin: The weights to compare with; they are cast as :meth:`load_weights` casts them.

        Returns:
            Names of the weights that differ, or exist on one side only.

        Raises:
            TransferError: The weights did not arrive as they were sent.
        """


class SleepingRollout(RolloutEngine, Protocol):
    """A rollout engine that can free its device for training ranks: capability ``sleep``.

    ``rollout.sleep`` needs it.
    """

    def sleep(self) -> MemoryUse:
        """Free the device's memory. The engine then has no weights and no requests; ``load_weights`` wakes it."""


class ObservableRollout(RolloutEngine, Protocol):
    """A rollout engine whose logits can be compared with those of other engines: capability ``observation``."""

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute the logits of given sequences over the whole vocabulary, each by itself and without padding.

        Returns:
            For each sequence a float32 ``[L, V]`` host tensor. Row t holds the logits *after* token t, not divided by a
            temperature. Any constant may be added to a row: an engine may return the log-softmax.
        """


@dataclass(frozen=True)
class RoutingShape:
    """Shape of the routing, the experts to which a model sends tokens.

    A rollout engine records the routing, and a training engine repeats it. The routing has one row for each token of
    prompt and response *but the last*: a rollout engine does not feed the last token of a sequence to the model, and no
    loss depends on the experts of that token. Legend: T tokens, L mixture-of-experts layers, K experts of a token.

    Attributes:
        layers: L, number of layers with a router; they are in the model's order.
        chosen: K, number of experts that each layer chooses for a token.
        experts: Number of experts of a layer; they are numbered from 0.
    """

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds the experts' numbers."""
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
            return (
                f"its routing names expert {high if high >= self.experts else low}, but experts are numbered from 0 to "
                f"{self.experts - 1}"
            )
        ordered = routing.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            return "its routing sends a token to the same expert twice"
        return None
