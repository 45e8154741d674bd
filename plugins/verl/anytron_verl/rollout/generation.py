"""A Hugging Face model that answers verl's requests in batches; without Ray.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from anytron import ConfigError, EngineError
from anytron.engines import GenerationRequest, Piece, PromptInputs, Response, SamplingParams
from anytron_rollout import build_model, generate, load_verified

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM takes the likeliest token (``_SAMPLING_EPS``); verl's requests are in vLLM's form."""
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0,
    "max_tokens": None, "max_new_tokens": None, "stop_token_ids": None, "ignore_eos": None,
}  # fmt: skip
"""Sampling parameters that a request may have besides ``logprobs`` and ``seed``, with their defaults."""


@dataclass(frozen=True)
class NamedWeights:
    """A model's weights as verl's engines export them, in the form for :func:`load_verified`.

    Attributes:
        version: verl's global step.
        tensors: Whole tensors on the host by their Hugging Face names.
    """

    version: int
    tensors: Sequence[tuple[str, Tensor]]

    def __iter__(self) -> Iterator[Piece]:
        """Yield each tensor as one piece."""
        for name, tensor in self.tensors:
            yield Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1), optional=False)


class Generation:
    """A model that generates, built from its config alone; its weights come from the training workers.

    Args:
        rollout: verl's ``RolloutConfig``.
        model: verl's ``HFModelConfig``.
        device: Device of the model.

    Raises:
        ConfigError: This rollout does not support a setting.
        EngineError: This rollout does not support the model or the dtype.
    """

    def __init__(self, rollout: Any, model: Any, device: torch.device) -> None:
        _refuse_settings(rollout, model)
        config = copy.deepcopy(model.hf_config)
        # verl asks transformers for flash-attn, unless its configuration says otherwise, which is for its own engines.
        built = build_model(config, getattr(torch, rollout.dtype), attn_implementation="sdpa")
        self._model = built.to(device).eval().requires_grad_(requires_grad=False)
        self._device = device
        self._rollout = rollout
        self._context_length = rollout.max_model_len or config.max_position_embeddings
        self._ends = _end_tokens(model)
        self._pad = model.tokenizer.pad_token_id if model.tokenizer.pad_token_id is not None else 0
        self._version: int | None = None

    def load_weights(self, weights: NamedWeights) -> None:
        """Load new weights.

        Raises:
            EngineError: A tensor is missing, unknown, or of a wrong shape. The rollout has no weights afterwards.
        """
        self._version = None
        load_verified(self._model, weights)
        self._version = weights.version

    def request(self, number: int, prompt: Sequence[int], params: Mapping[str, Any], seed: int) -> GenerationRequest:
        """Read a request of verl, which uses vLLM's parameter names.

        Args:
            number: Number of the request, unique among those of one call of :meth:`generate`.
            prompt: Token ids.
            params: verl's ``sampling_params``.
            seed: Seed in ``[0, 2**63)``; a seed in ``params`` takes precedence.

        Raises:
            EngineError: The request needs a feature that this rollout lacks, or leaves no room for a token.
        """
        params = dict(params)
        params.pop("logprobs", None)
        given = params.pop("seed", None)
        unknown = sorted(set(params) - set(DEFAULTS))
        params = {**DEFAULTS, **params}
        if params["repetition_penalty"] != 1.0:
            unknown.append("repetition_penalty")
        if unknown:
            raise _cannot(f"sampling by {', '.join(unknown)}", "sampling_params")
        greedy = params["temperature"] < GREEDY_BELOW
        ignore_ends = self._rollout.ignore_eos if params["ignore_eos"] is None else params["ignore_eos"]
        ends = set(params["stop_token_ids"] or ()) | (set() if ignore_ends else self._ends)
        sampling = SamplingParams(
            max_new_tokens=self._room(len(prompt), params["max_tokens"] or params["max_new_tokens"]),
            temperature=0.0 if greedy else float(params["temperature"]),
            top_p=1.0 if greedy else float(params["top_p"]),
            top_k=0 if greedy else max(0, int(params["top_k"])),
            end_token_ids=tuple(sorted(ends)),
            pad_token_id=self._pad,
        )
        return GenerationRequest(number, PromptInputs(tuple(prompt)), sampling, seed if given is None else int(given))

    def generate(self, requests: Sequence[GenerationRequest], interruption: threading.Event) -> list[Response]:
        """Generate responses to requests with the same sampling settings.

        Log-probs refer to the distribution that tokens are drawn from, after temperature, top-k and top-p: vLLM's
        ``processed_logprobs``, verl's default. For greedy tokens they are the model's own, at temperature 1, as in
        vLLM.

        Args:
            requests: One or more requests.
            interruption: Once it is set, every response ends, with the stop reason ``abort`` where it was not complete.

        Raises:
            EngineError: No weights have been loaded.
        """
        if self._version is None:
            raise EngineError(
                "The rollout has received no weights yet.",
                where="rollout transformers",
                fix="call load_weights() before generate(), as verl's trainers do",
            )
        sampling = requests[0].sampling
        # What has gone through the warpers is drawn from as it is; the likeliest token is the first one of top-k.
        drawn = replace(sampling, temperature=1.0, top_p=1.0, top_k=int(sampling.temperature == 0))
        responses = generate(
            self._model,
            [replace(request, sampling=drawn) for request in requests],
            self._version,
            device=self._device,
            processors=_warpers(sampling),
            criteria=[_Interrupted(interruption)],
        )
        return [
            replace(response, stop_reason="abort")
            if response.stop_reason == "length" and len(response.tokens) < sampling.max_new_tokens
            else response
            for response in responses
        ]

    def _room(self, prompt: int, asked: int | None) -> int:
        """Tokens that a response may have: those asked for, else verl's; no more than the context has room for."""
        left = self._context_length - prompt
        if left < 1:
            raise EngineError(
                "A prompt leaves no room for a response.",
                where="actor_rollout_ref.rollout.max_model_len",
                why=f"it has {prompt} tokens, but prompt and response together may have {self._context_length}",
                fix="raise actor_rollout_ref.rollout.max_model_len, or lower data.max_prompt_length",
            )
        whole, response = self._rollout.prompt_length + self._rollout.response_length, self._rollout.response_length
        room: int = max(1, min(left, min(response, whole - prompt) if asked is None else asked))
        return room


class _Interrupted(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - a fixed signature
        """Return bool ``[B]``, True = ended."""
        return torch.full((len(input_ids),), self._event.is_set(), device=input_ids.device)


def _warpers(sampling: SamplingParams) -> Iterator[Any]:
    """The processors of logits, in vLLM's order; none for greedy tokens."""
    if sampling.temperature not in (0.0, 1.0):
        yield TemperatureLogitsWarper(sampling.temperature)
    if sampling.top_k > 0:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1.0:
        yield TopPLogitsWarper(sampling.top_p)


def _end_tokens(model: Any) -> set[int]:
    """The tokens that end a response: from the tokenizer and ``generation_config.json``, as in vLLM."""
    found = {model.tokenizer.eos_token_id}
    told = getattr(model.generation_config, "eos_token_id", None)
    found |= set(told) if isinstance(told, list) else {told}
    return found - {None}


def _refuse_settings(rollout: Any, model: Any) -> None:
    """Refuse settings of verl that this rollout does not support.

    Raises:
        ConfigError: A setting of the rollout is not supported; the error names the first one.
        EngineError: The model or the dtype is not supported.
    """
    lora = max(model.lora_rank, model.lora.get("rank", 0)) if not model.lora.get("merge", False) else 0
    wrong = {
        "tensor_model_parallel_size": (rollout.tensor_model_parallel_size, 1),
        "data_parallel_size": (rollout.data_parallel_size, 1),
        "pipeline_model_parallel_size": (rollout.pipeline_model_parallel_size, 1),
        "load_format": (rollout.load_format, "dummy"),
        "logprobs_mode": (rollout.logprobs_mode, "processed_logprobs"),
        "full_determinism": (rollout.full_determinism, False),
        "enable_rollout_routing_replay": (rollout.enable_rollout_routing_replay, False),
        "quantization": (rollout.quantization, None),
    }
    for key, (value, needed) in wrong.items():
        if value != needed:
            raise ConfigError(
                "verl's rollout 'transformers' does not support this setting.",
                where=f"actor_rollout_ref.rollout.{key}",
                why=f"it is {value!r}, but this rollout supports {needed!r} only",
                fix=f"set actor_rollout_ref.rollout.{key}={'null' if needed is None else needed}",
            )
    if lora > 0:
        key = "actor_rollout_ref.model.lora"
        raise _cannot("adapters that are not merged", key, f"set {key}.merge=True")
    if model.hf_config.get_text_config() is not model.hf_config:
        raise _cannot("models of images, videos or sound", "actor_rollout_ref.model.path")
    if not isinstance(getattr(torch, str(rollout.dtype), None), torch.dtype):
        raise _cannot(
            f"the dtype {rollout.dtype!r}", "actor_rollout_ref.rollout.dtype", "set bfloat16, float16 or float32"
        )


def _cannot(what: str, where: str, fix: str = "") -> EngineError:
    fix = fix or "install vllm, and set actor_rollout_ref.rollout.name=vllm"
    why = "it is a small rollout for devices that verl's other rollouts do not support"
    return EngineError(f"verl's rollout 'transformers' does not support {what}.", where=where, why=why, fix=fix)
