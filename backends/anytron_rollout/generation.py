"""Generate with a Hugging Face model: build it without weights, and answer requests with the same sampling parameters.

Legend: B rows, P different prompts, S columns of the prompts, V vocabulary, W generated columns.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.initialization import no_init_weights

from anytron.task.data.pretrained import logits_config, model_class, take_latent_epsilon
from anytron.workers.engines.rollout_engine import Response, SamplingParams, StopReason
from anytron.workers.engines.sampling import TokenDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs
    from anytron.workers.engines.sampling import StopStrings

    Score = Callable[[Tensor, float], Tensor]


_ARGUMENTS = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values"})


_CHOOSING_BIAS = "e_score_correction_bias"
"""Part of the names of the biases by which routers choose experts, in every family that Anytron trains."""


def build_model(config: Any, dtype: torch.dtype, **arguments: Any) -> Any:
    """Build a model from its config, with uninitialized weights: drawing random ones takes seconds per billion.

    Args:
        config: A ``transformers.PretrainedConfig``.
        dtype: Element type of the parameters, except those that transformers reads in float32 whatever ``dtype`` is,
            such as the biases by which routers choose: rounded, they would choose other experts than training.
        arguments: Further arguments of transformers' ``from_config``, for example ``attn_implementation``.

    Returns:
        A ``transformers.PreTrainedModel`` on the host.
    """
    config = logits_config(config)
    with no_init_weights():
        model = model_class(config).from_config(config, dtype=dtype, **arguments)
    _keep_in_float32(model, dtype)
    model.tie_weights()
    take_latent_epsilon(model)
    # The model's own sampling defaults (temperature, repetition penalty) must not take effect.
    model.generation_config = GenerationConfig()
    return model


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Convert to float32 the tensors that ``from_pretrained`` reads in float32, and every router's choosing bias.

    ``from_config`` leaves them in ``dtype`` (transformers 5.23, ``_get_dtype_plan``), and the list of transformers has
    no bias of MiniMax-M2. In training these biases are float32.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    kept = (_CHOOSING_BIAS, *(model._keep_in_fp32_modules_strict or () if half else ()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in kept):
            tensor.data = tensor.data.float()


@torch.inference_mode()
def generate(
    model: Any,
    requests: Sequence[GenerationRequest],
    version: int,
    *,
    device: torch.device,
    share_prompts: bool = True,
    stop: StopStrings | None = None,
    score: Score | None = None,
    processors: Iterable[LogitsProcessor] = (),
    criteria: Iterable[StoppingCriteria] = (),
) -> list[Response]:
    """Generate the responses to requests with the same sampling settings, in one batch.

    Args:
        model: A Hugging Face model.
        requests: The requests; at least one.
        version: Version of the model's weights.
        device: Device of the model's inputs.
        share_prompts: Whether to compute equal prompts only once, if the model supports it (:func:`can_share`).
        stop: Matcher of the requests' stop strings; None = no stop strings.
        score: Computes the log-probs of drawn tokens; None = they are computed from the logits.
        processors: Logits processors, applied before a token is drawn.
        criteria: Stopping criteria in addition to the requests' own limits.
    """
    sampling, prompts = requests[0].sampling, [request.prompt for request in requests]
    input_ids, attention_mask = _left_pad([prompt.tokens for prompt in prompts], sampling.pad_token_id)
    images = [prompt.images for prompt in prompts if prompt.images is not None]
    arguments: dict[str, Any] = image_arguments(model, images, input_ids, device) if images else {}
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    rows, owners = owners_of(prompts)
    # A pass of one column counts as a token that was generated: transformers would keep no padding out of recurrent
    # states (masking_utils.py, create_recurrent_attention_mask).
    if share_prompts and len(rows) < len(prompts) and input_ids.shape[1] > 2 and can_share(model):
        arguments["past_key_values"] = read_prompts(model, input_ids, attention_mask, rows, owners)
    seeds, width = [request.seed for request in requests], input_ids.shape[1]
    sampler = TokenSampler(sampling, seeds, prompt_width=width, stop=stop, score=score)
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        **arguments,
        # Our sampler does all of the sampling, end tokens included: this code could not tell in which
        # order transformers' own processors come.
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=sampling.max_new_tokens, pad_token_id=sampling.pad_token_id
        ),
        logits_processor=LogitsProcessorList([*processors, sampler]),
        stopping_criteria=StoppingCriteriaList([sampler.stopping, *criteria]),
    )
    return sampler.responses(output, version)


def image_arguments(
    model: Any, images: Sequence[ImagePatches], input_ids: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Make the model's image arguments; images are in the order of the rows that hold their tokens.

    ``mm_token_type_ids`` (0 = text, 1 = image) tells where mrope's positions are two-dimensional. Without it,
    transformers silently treats image tokens as text.
    """
    arguments = {
        "pixel_values": torch.cat([patches.pixel_values for patches in images]),
        "image_grid_thw": torch.cat([patches.grid_thw for patches in images]),
        "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
    }
    return {name: value.to(device) for name, value in arguments.items()}


def _left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Arrange prompts of different lengths so that they all end in the last column.

    Returns:
        ``input_ids`` and ``attention_mask`` (1 = real token), both int64 ``[B, S]``.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    real = torch.arange(width) >= (width - lengths)[:, None]
    input_ids = torch.full((len(prompts), width), pad_token_id)
    input_ids[real] = torch.tensor([token for prompt in prompts for token in prompt])
    return input_ids, real.long()


class TokenSampler(LogitsProcessor):
    """Draw each row's next token (``anytron.workers.engines.sampling.TokenDraws``), and keep the tokens' log-probs.

    Only one ``[B, V]`` tensor exists at a time (``output_logits=True`` would keep W of them).

    Args:
        sampling: The sampling settings.
        seeds: Seeds of the B rows.
        prompt_width: Columns of the prompt.
        stop: Matcher of the stop strings of ``sampling``; None = no stop strings.
        score: Computes the log-probs of drawn tokens, int64 ``[B]``, at a temperature: float32 ``[B]``; None = they are
            computed from the logits.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        prompt_width: int,
        stop: StopStrings | None,
        score: Score | None = None,
    ) -> None:
        self.stopping = _Stopping(sampling, prompt_width, stop)
        self._prompt_width = prompt_width
        self._draws = TokenDraws(sampling, seeds)
        self._log_probs: list[Tensor] = []
        self._score = score

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw the next tokens.

        Args:
            input_ids: int64 ``[B, prompt_width + tokens so far]``.
            scores: float32 ``[B, V]`` logits.

        Returns:
            float32 ``[B, V]``: 0 for the token that was drawn, -inf for all others. ``generate`` takes the largest.
        """
        drawn, log_probs = self._draws(scores, input_ids.shape[1] - self._prompt_width)
        if self._score is not None:
            log_probs = self._score(drawn, self._draws.temperature)
        self._log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn[:, None], 0.0)

    def responses(self, sequences: Tensor, version: int) -> list[Response]:
        """Return the responses: each row without the prompt, cut where its response ends.

        Args:
            sequences: int64 ``[B, prompt_width + W]``, as ``generate`` returns them; tokens after a row's end
                mean nothing.
            version: Version of the weights.
        """
        tokens = sequences[:, self._prompt_width :].tolist()
        log_probs = torch.stack(self._log_probs, dim=1).tolist()
        responses = []
        for row, values, end in zip(tokens, log_probs, self.stopping.ends.tolist(), strict=True):
            length = end or len(row)
            reason: StopReason = "stop" if end else "length"
            responses.append(Response(tuple(row[:length]), tuple(values[:length]), reason, (version,) * length))
        return responses


class _Stopping(StoppingCriteria):
    """Tell which rows have ended, and keep after how many tokens each did.

    The count is needed because tokens after an end look like any others.
    """

    def __init__(self, sampling: SamplingParams, prompt_width: int, stop: StopStrings | None) -> None:
        self.ends: Tensor = torch.empty(0)
        self._prompt_width = prompt_width
        self._minimum = sampling.min_new_tokens
        self._end_tokens = torch.tensor(sampling.end_token_ids, dtype=torch.int64)
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - a fixed signature
        """Look at the drawn tokens, int64 ``input_ids[:, -1]``; return bool ``[B]``, True = ended."""
        drawn = input_ids[:, -1]
        count = input_ids.shape[1] - self._prompt_width
        if count == 1:
            self._end_tokens = self._end_tokens.to(drawn.device)
            self.ends = torch.zeros_like(drawn)
        if count >= self._minimum:
            ended = torch.isin(drawn, self._end_tokens)
            if self._stop is not None:
                tails = input_ids[:, max(self._prompt_width, input_ids.shape[1] - self._stop.tail) :]
                ended |= torch.tensor(self._stop.shown(tails.tolist()), device=drawn.device)
            self.ends = torch.where((self.ends == 0) & ended, count, self.ends)
        return self.ends > 0


def can_share(model: Any) -> bool:
    """Return whether a model generates the same with a cache that is passed to it as with a cache that it makes.

    This is true of text models whose layers keep their state in transformers' ``DynamicCache``. Models with images
    compute positions themselves, and some families have other caches.

    Args:
        model: A Hugging Face model.
    """
    config, decoder = model.config, model.get_decoder()
    return (
        not config.is_encoder_decoder
        and config.get_text_config() is config
        and model._supports_default_dynamic_cache()  # as generate decides; no public way to ask
        and decoder is not model
        and set(inspect.signature(decoder.forward).parameters) >= _ARGUMENTS
    )


def owners_of(prompts: Sequence[PromptInputs]) -> tuple[list[int], list[int]]:
    """Find the different prompts.

    Args:
        prompts: B prompts.

    Returns:
        For each of the P different prompts, the first row that has it; for each row, the index of its prompt among the
        P.
    """
    places: dict[tuple[int, ...], int] = {}
    rows: list[int] = []
    owners: list[int] = []
    for row, prompt in enumerate(prompts):
        place = places.setdefault(tuple(prompt.tokens), len(rows))
        if place == len(rows):
            rows.append(row)
        owners.append(place)
    return rows, owners


def read_prompts(
    model: Any, input_ids: Tensor, attention_mask: Tensor, rows: Sequence[int], owners: Sequence[int]
) -> DynamicCache:
    """Run a model on different prompts without their last tokens, whose outputs ``generate`` must compute.

    Args:
        model: A model for which :func:`can_share` is true.
        input_ids: int64 ``[B, S]``, padded to the left, S > 2.
        attention_mask: int64 ``[B, S]``, 1 = real token.
        rows: For each of the P different prompts, a row that has it.
        owners: For each of the B rows, the index of its prompt among the P.

    Returns:
        The cache of B rows and S - 1 columns, for the argument ``past_key_values`` of ``generate``.
    """
    ids, mask = input_ids[list(rows), :-1], attention_mask[list(rows), :-1]
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # padding's too, as generate counts them
    model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    # Unlike batch_select_indices, beam search's way of choosing rows is known to recurrent layers as well.
    cache.reorder_cache(torch.LongTensor(owners))
    return cache
