"""Generate with Hugging Face ``transformers``, in a process without any code of a training engine."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from anytron.base.errors import EngineError
from anytron.task.data.pretrained import load_hf_config, load_tokenizer, model_class, take_latent_epsilon
from anytron.workers.engines.device_memory import MemoryUse, Parked
from anytron.workers.engines.sampling import RequestQueue, StopStrings
from anytron_rollout.options import TransformersOptions
from anytron_rollout.placement import place
from anytron_rollout.routing import RoutingRecorder, with_routing
from anytron_rollout.sampling import TokenSampler
from anytron_rollout.shared_prompts import can_share, owners_of, read_prompts
from anytron_rollout.weights import differing_weights, load_verified

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.context import EngineContext
    from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response, SamplingParams
    from anytron.workers.weights.transfer import WeightOrigin


class TransformersEngine:
    """A rollout engine (:class:`anytron.workers.engines.rollout_engine.RolloutEngine`).

    The model is built from its config alone. Its weights always come from the training engine, before the first
    rollout as after every update. A poll generates one batch, of ``rollout.max_batch_size`` responses at most, to its
    end, however long that takes: ``generate`` cannot be left in between.

    Args:
        context: This process and its run.

    Raises:
        ConfigError: The model's config or ``rollout.options`` are not usable.
    """

    def __init__(self, context: EngineContext) -> None:
        rollout = context.config.rollout
        options = TransformersOptions.model_validate(rollout.options)
        self._context = context
        self._max_batch_size = rollout.max_batch_size
        self._runtime = context.layer.platform.runtime()
        self._tokenizer: Any = None
        self._version: int | None = None
        self._queue = RequestQueue()
        self._parked: Parked | None = None  # while it sleeps
        config = load_hf_config(context.config.model)
        dtype = getattr(torch, context.config.model.dtype)
        attention = options.model_dump(include={"attn_implementation"}, exclude_none=True)
        model = model_class(config).from_config(config, dtype=dtype, **attention)
        take_latent_epsilon(model)
        # The model's own sampling defaults (temperature, repetition penalty) must not take effect.
        model.generation_config = GenerationConfig()
        self._model = place(model, self._runtime, options.device_map).eval().requires_grad_(requires_grad=False)
        self._routing = RoutingRecorder(self._model) if rollout.replay_routing else None
        self._shares_prompts = self._routing is None and can_share(self._model)  # routing is of every row's every token

    def load_weights(self, origin: WeightOrigin) -> int:
        """Load new weights and verify them, see :func:`anytron_rollout.weights.load_verified`."""
        with origin.open() as weights:
            self._version = None  # never generate with half-loaded weights
            if self._parked is not None:
                self._parked.take_back()
                self._parked = None
            load_verified(self._model, weights)
            self._version = weights.version
        return self._version

    def differing_weights(self, origin: WeightOrigin) -> list[str]:
        """Name the model's weights that are not those of an origin."""
        with origin.open() as weights:
            return differing_weights(self._model, weights)

    def sleep(self) -> MemoryUse:
        """Empty the device's memory of the model; what no weights come for, such as frequencies, waits on the host."""
        self._version = None
        peak = self._runtime.memory_stats().peak_allocated
        if self._parked is None:
            self._runtime.synchronize()
            loaded = {id(tensor) for tensor in self._model.state_dict(keep_vars=True).values()}
            others = [buffer for buffer in self._model.buffers() if id(buffer) not in loaded]
            pin = self._runtime.can_pin_memory()
            self._parked = Parked(others, chain(self._model.parameters(), self._model.buffers()), pin=pin)
            self._runtime.empty_cache()
        self._runtime.reset_peak_memory_stats()
        return MemoryUse(peak, self._parked.num_bytes)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; the longest prompts come first, so that a batch has little padding."""
        self._queue.add(requests)

    def poll(self, seconds: float) -> list[tuple[int, Response]]:  # noqa: ARG002 - a batch takes what it takes
        """Generate the next batch: requests that are sampled alike.

        Raises:
            EngineError: No weights have been loaded.
        """
        if self._version is None:
            raise EngineError("The rollout engine has no weights yet.", fix="call load_weights before poll")
        batch = self._queue.take(self._max_batch_size)
        if not batch:
            return []
        return list(zip([request.id for request in batch], self._generate(batch, self._version), strict=True))

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Give up requests; between two polls, none has begun."""
        return self._queue.abort(ids)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute whole logits of the sequences, one at a time and without padding."""
        device = self._runtime.current_device()
        found = []
        for sequence in sequences:
            input_ids = torch.tensor([sequence.tokens])
            arguments = {} if sequence.images is None else self._image_arguments([sequence.images], input_ids)
            output = self._model(input_ids.to(device), **{name: value.to(device) for name, value in arguments.items()})
            found.append(output.logits[0].float().cpu())
        return found

    def describe(self) -> Mapping[str, Any]:
        """Return the engine, its versions, the device, and the patches of this process."""
        return {
            "engine": "transformers",
            "model": type(self._model).__name__,
            "device": str(self._runtime.current_device()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "patches": self._context.layer.ledger.report(),
        }

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest], version: int) -> list[Response]:
        sampling, prompts = requests[0].sampling, [request.prompt for request in requests]
        input_ids, attention_mask = left_pad([prompt.tokens for prompt in prompts], sampling.pad_token_id)
        images = [prompt.images for prompt in prompts if prompt.images is not None]
        arguments: dict[str, Any] = self._image_arguments(images, input_ids) if images else {}
        device = self._runtime.current_device()
        arguments = {name: value.to(device) for name, value in arguments.items()}
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        rows, owners = owners_of(prompts)
        if self._shares_prompts and len(rows) < len(prompts) and input_ids.shape[1] > 1:
            arguments["past_key_values"] = read_prompts(self._model, input_ids, attention_mask, rows, owners)
        seeds, stop = [request.seed for request in requests], self._stop_strings(sampling)
        sampler = TokenSampler(sampling, seeds, prompt_width=input_ids.shape[1], stop=stop)
        with self._recording() as passes:
            output = self._model.generate(
                input_ids,
                attention_mask=attention_mask,
                **arguments,
                # Our sampler does all of the sampling, end tokens included: this code could not tell in which
                # order transformers' own processors come.
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=sampling.max_new_tokens, pad_token_id=sampling.pad_token_id
                ),
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([sampler.stopping]),
            )
        responses = sampler.responses(output, version)
        return with_routing(responses, prompts, passes) if passes else responses

    def _recording(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Keep the experts of every token, if they are asked for."""
        return contextlib.nullcontext([]) if self._routing is None else self._routing.recording()

    def _image_arguments(self, images: Sequence[ImagePatches], input_ids: Tensor) -> dict[str, Tensor]:
        """Make the model's arguments for images, which are in the order of the rows that hold their tokens.

        ``mm_token_type_ids`` (0 = text, 1 = image) tells where mrope's positions are two-dimensional. Without it
        transformers takes image tokens for text, without an error.
        """
        return {
            "pixel_values": torch.cat([patches.pixel_values for patches in images]),
            "image_grid_thw": torch.cat([patches.grid_thw for patches in images]),
            "mm_token_type_ids": (input_ids == self._model.config.image_token_id).int(),
        }

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if sampling.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._context.config.model)
        return StopStrings(sampling.stop, self._tokenizer) if sampling.stop else None


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
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
