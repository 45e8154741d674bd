"""The bodies of requests: every field that the server knows, each with its allowed values.

A field that would change the answer and that rollout engines cannot honour is refused, not ignored. Fields of OpenAI's
API that change no answer (:class:`Common`, last group) are read and have no effect.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from anytron.config.json_files import parse_object
from anytron.serving.refusal import Refusal

if TYPE_CHECKING:
    from anytron.workers.engines.rollout_engine import SamplingParams

COLDEST = 0.001
"""Least temperature, besides 0."""
Model = TypeVar("Model", bound=BaseModel)


def _usable(temperature: float) -> float:
    """Refuse temperatures by which logits cannot be divided in float32."""
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0 (the most probable token) or at least {COLDEST}")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_usable)]
Zero = Annotated[float, Field(ge=0, le=0)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Whether the last chunk of a stream counts the tokens."""

    include_usage: bool | None = None


class Common(_Body):
    """Fields of chat completions and completions."""

    model: str
    n: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    stop: Text | Annotated[list[Text], Field(max_length=8)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage(self) -> bool:
        """Whether the last chunk of a stream counts the tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ResponseFormat(_Body):
    """Form of the answer: text."""

    type: Literal["text"]


class ChatBody(Common):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Any]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class CompletionBody(Common):
    """Body of ``POST /v1/completions``."""

    prompt: str | Ids
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None


class TokenSampling(_Body):
    """Sampling parameters of ``POST /inference/v1/generate``, under vLLM's names."""

    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: Zero | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    skip_special_tokens: bool | None = None  # the answer is token ids
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None


class TokensBody(_Body):
    """Body of ``POST /inference/v1/generate``."""

    model: str
    token_ids: Ids
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    stream: Literal[False] | None = None
    cache_salt: str | None = None
    priority: int | None = None


class RewardBody(_Body):
    """Body of ``POST /v1/reward``."""

    reward: float
    metrics: Annotated[dict[Annotated[str, Field(min_length=1, max_length=100)], float], Field(max_length=100)] = Field(
        default_factory=dict
    )


def read(body: bytes, kind: type[Model]) -> Model:
    """Read the body of a request.

    Raises:
        Refusal: The body is not a JSON object, or has a field that the server does not know or a value that it forbids.
    """
    try:
        return kind.model_validate(parse_object(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))[:100]
        why = first["msg"]
        if first["type"] == "extra_forbidden":
            why = "the server does not know this field, or cannot honour it; remove it"
        raise Refusal(400, "invalid_request", f"{name}: {why}", name) from None
    except ValueError as error:
        raise Refusal(400, "invalid_request", f"The body cannot be read: {error}") from None


def template_arguments(body: ChatBody) -> dict[str, Any]:
    """Return further arguments of the chat template.

    Raises:
        Refusal: The request sets an argument that the server itself sets.
    """
    from transformers import PreTrainedTokenizerBase

    given = dict(body.chat_template_kwargs or {})
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if taken := sorted(given.keys() & {*own, "messages"}):
        why = f"{', '.join(taken)} is set by the server"
        raise Refusal(400, "invalid_request", f"chat_template_kwargs: {why}; remove it", "chat_template_kwargs")
    return given


def sampling_of(
    body: Common | TokenSampling, default: SamplingParams, longest: int, most: int | None = None
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        body: The request; fields that are not set have the values of ``default``.
        default: Sampling parameters of the run or of the command.
        longest: Longest answer, in tokens, that fits into the model's context after the prompt.
        most: Longest answer, in tokens, that a request gets, whatever it asks for; None = any that fits.

    Raises:
        Refusal: The answer would not fit into the model's context.
    """
    asked, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is not None and most is not None:
        asked = min(asked, most)
    if longest < 1 or (asked is not None and asked > longest):
        why = f"{max(longest, 0)} tokens of the model's context are left after the prompt"
        wanted = "an answer" if asked is None else f"an answer of {asked} tokens"
        fix = "shorten the prompt" if longest < 1 else f"lower {name}"
        raise Refusal(400, "context_length_exceeded", f"There is no room for {wanted}: {why}; {fix}.", name)
    found = replace(default, max_new_tokens=min(default.max_new_tokens, longest) if asked is None else asked)
    if body.temperature == 0:  # log-probs stay those of the model at temperature 1
        found = replace(found, temperature=1.0, top_k=1, top_p=1.0)
    elif body.temperature is not None:
        found = replace(found, temperature=body.temperature)
    if body.top_p is not None and body.temperature != 0:
        found = replace(found, top_p=body.top_p)
    if body.top_k is not None and body.temperature != 0:
        found = replace(found, top_k=max(body.top_k, 0))
    if isinstance(body, TokenSampling):
        ends = (*default.end_token_ids, *(one for one in body.stop_token_ids or () if one not in default.end_token_ids))
        shortest = min(body.min_tokens or 0, found.max_new_tokens)
        return replace(found, end_token_ids=ends, min_new_tokens=shortest)
    return replace(found, stop=default.stop if body.stop is None else body.stops, min_new_tokens=0)


def check_terms(body: Common | TokenSampling, asked: SamplingParams, run: SamplingParams) -> SamplingParams:
    """Check that a request asks for the sampling of the run that trains on its answer.

    Args:
        body: The request.
        asked: Its sampling parameters.
        run: The run's sampling parameters.

    Returns:
        The sampling parameters; an answer has at least as many tokens as the run requires (``min_new_tokens``).

    Raises:
        Refusal: The answer would be sampled in another way.
    """
    others = [name for name in ("temperature", "top_p", "top_k") if getattr(asked, name) != getattr(run, name)]
    others += [] if set(asked.end_token_ids) == set(run.end_token_ids) else ["stop_token_ids"]
    others += [] if body.seed is None else ["seed"]
    if others:
        why = "a run trains on this answer and chooses how it is sampled"
        raise Refusal(400, "other_sampling", f"{', '.join(others)}: {why}; remove it from the request.", others[0])
    shortest = max(asked.min_new_tokens, run.min_new_tokens)
    return replace(asked, min_new_tokens=min(shortest, asked.max_new_tokens))


def check_engine(asked: SamplingParams, run: SamplingParams) -> None:
    """Check that the engine of a run can answer a request together with the run's requests.

    Raises:
        Refusal: The request has another temperature, and an engine samples at one temperature at a time.
    """
    if asked.temperature != run.temperature:
        why = f"this model is being trained at temperature {run.temperature:g}, and its engine has one at a time"
        raise Refusal(400, "other_sampling", f"temperature: {why}; remove it from the request.", "temperature")
