"""Generate with Hugging Face ``transformers``, in a process without any code of a training engine.

Legend of routing: B rows, S columns of the prompt, W generated columns, L mixture-of-experts layers, K experts of a
token.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers

from anytron.base.errors import ConfigError, EngineError
from anytron.task.data.pretrained import load_hf_config, load_tokenizer
from anytron.workers.engines.device_memory import MemoryUse, Parked
from anytron.workers.engines.rollout_engine import RoutingShape
from anytron.workers.engines.sampling import RequestQueue, StopStrings
from anytron_rollout.generation import build_model, generate, image_arguments
from anytron_rollout.invariant import ATTENTION, InvariantModel, offer_attention
from anytron_rollout.options import TransformersOptions
from anytron_rollout.quantization import quantize, quantized_weights
from anytron_rollout.weights import differing_weights, load_verified

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from anytron.device.runtime import DeviceRuntime
    from anytron.workers.engines.context import EngineContext
    from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response, SamplingParams
    from anytron.workers.weights.transfer import WeightOrigin


EXPERTS = ".mlp.experts"
"""End of the names of the modules that hold a layer's experts. Whatever the router, they are called with (hidden states
``[N, H]``, chosen experts ``[N, K]``, weights ``[N, K]``) for N tokens of H features."""

_NO_LIMIT = 1 << 60
"""Bytes of a device. The real limit is not known here: the training engine takes its memory later."""


class TransformersEngine:
    """The rollout engine ``transformers`` (:class:`anytron.workers.engines.rollout_engine.RolloutEngine`).

    The model is built from its config alone. Its weights always come from the training engine, even before the first
    rollout. ``generate`` cannot be interrupted, so a poll generates one batch of at most ``rollout.max_batch_size``
    responses to its end, however long that takes.

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
        self._runtime = context.stack.platform.runtime()
        self._tokenizer: Any = None
        self._version: int | None = None
        self._queue = RequestQueue()
        self._parked: Parked | None = None  # while it sleeps
        config = load_hf_config(context.config.model)
        dtype = getattr(torch, context.config.model.dtype)
        bitwise = context.config.engine.on_policy == "bitwise"
        attention = options.model_dump(include={"attn_implementation"}, exclude_none=True)
        if bitwise:
            context.stack.hooks.invariant = True
            offer_attention()
            attention["attn_implementation"] = ATTENTION
        model = build_model(config, dtype, **attention)
        self._model = place(model, self._runtime, options.device_map).eval().requires_grad_(requires_grad=False)
        self._invariant: InvariantModel | None = None
        if bitwise:
            chunk = context.config.engine.log_prob_chunk_tokens
            self._invariant = InvariantModel(self._model, context.stack.hooks, self._runtime.device_type, chunk)
        self._routing = RoutingRecorder(self._model) if rollout.replay_routing else None
        self._quantized = quantized_weights(self._model) if rollout.quantization else []
        self._shares_prompts = self._routing is None  # routing is of every row's every token

    def load_weights(self, origin: WeightOrigin) -> int:
        """Load and verify new weights (:func:`anytron_rollout.weights.load_verified`); return their version.

        With ``rollout.quantization`` they are rounded afterwards.
        """
        with origin.open() as weights:
            self._version = None  # never generate with half-loaded weights
            if self._parked is not None:
                self._parked.take_back()
                self._parked = None
            load_verified(self._model, weights)
            quantize(self._quantized)
            self._version = weights.version
        return self._version

    def differing_weights(self, origin: WeightOrigin) -> list[str]:
        """Return the names of the model's weights that differ from the given ones."""
        with origin.open() as weights:
            return differing_weights(self._model, weights)

    def sleep(self) -> MemoryUse:
        """Free the model's device memory; buffers that are not weights (rotary frequencies, ...) move to the host."""
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
        """Generate the next batch: requests with the same sampling settings.

        Raises:
            EngineError: No weights have been loaded.
        """
        if self._version is None:
            raise EngineError("The rollout engine has no weights yet.", where="poll", fix="call load_weights() first")
        batch = self._queue.take(self._max_batch_size, same_length=self._invariant is not None)
        if not batch:
            return []
        return list(zip([request.id for request in batch], self._generate(batch, self._version), strict=True))

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Abort queued requests, all if ``ids`` is None; no request is in progress between two polls."""
        return self._queue.abort(ids)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute each sequence's logits, one sequence at a time: float32 ``[tokens, vocabulary]`` on the host."""
        device = self._runtime.current_device()
        found = []
        for sequence in sequences:
            input_ids = torch.tensor([sequence.tokens])
            images = [] if sequence.images is None else [sequence.images]
            arguments = image_arguments(self._model, images, input_ids, device) if images else {}
            output = self._model(input_ids.to(device), **arguments)
            found.append(output.logits[0].float().cpu())
        return found

    def describe(self) -> Mapping[str, Any]:
        """Return the engine, its versions, the device, and the patches of this process."""
        return {
            "engine": "transformers",
            "model": type(self._model).__name__,
            "device": str(self._runtime.current_device()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "patches": self._context.stack.ledger.report(),
        }

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest], version: int) -> list[Response]:
        with self._recording() as passes:
            responses = generate(
                self._model,
                requests,
                version,
                device=self._runtime.current_device(),
                share_prompts=self._shares_prompts,
                stop=self._stop_strings(requests[0].sampling),
                score=None if self._invariant is None else self._invariant.score,
            )
        return with_routing(responses, [request.prompt for request in requests], passes) if passes else responses

    def _recording(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Record the experts of every token, if ``rollout.replay_routing`` is set."""
        return contextlib.nullcontext([]) if self._routing is None else self._routing.recording()

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if sampling.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._context.config.model)
        return StopStrings(sampling.stop, self._tokenizer) if sampling.stop else None


def place(model: Any, runtime: DeviceRuntime, device_map: Literal["balanced"] | None) -> Any:
    """Move a model to its device or devices.

    Args:
        model: A Hugging Face model, on the host.
        runtime: The devices.
        device_map: None = the whole model on the current device; ``balanced`` = its layers in order on all devices
            that this process can use, as many bytes on each (accelerate's big model inference). With ``balanced``,
            one device computes at a time: use it for models that do not fit on one device.

    Raises:
        ConfigError: ``device_map`` is set, but there is only one device.
    """
    if device_map is None:
        placed = model.to(runtime.current_device())
        placed.tie_weights()  # some devices' torch makes new parameters, which are not shared any more
        return placed
    devices = runtime.device_count()
    if devices < 2:
        raise ConfigError(
            "The rollout model cannot be spread over several devices.",
            where="rollout.options.device_map",
            why=f"{device_map} needs at least two devices, but this process can use {devices}",
            fix="remove rollout.options.device_map, or give the process several devices",
        )
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = model._no_split_modules
    limits = get_balanced_memory(
        model, max_memory=dict.fromkeys(range(devices), _NO_LIMIT), no_split_module_classes=whole
    )
    return dispatch_model(model, infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole))


class RoutingRecorder:
    """Records which experts the routers of one model choose.

    Args:
        model: A Hugging Face model of a type in :data:`anytron_rollout.checks.RECORDED`.

    Raises:
        EngineError: The model has no modules of experts with the name that transformers gives them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._experts: list[Any] = [module for name, module in model.named_modules() if name.endswith(EXPERTS)]
        if not self._experts:
            raise _unknown(f"it has no module whose name ends with {EXPERTS}")

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Return a list to which each forward pass appends the chosen experts: ``[B * columns, L, K]``, on the host."""
        steps: list[Tensor] = []
        layers: list[Tensor] = []

        def note_layer(experts: nn.Module, arguments: tuple[Any, ...]) -> None:
            chosen = arguments[1] if len(arguments) > 1 else None
            if not isinstance(chosen, torch.Tensor) or chosen.is_floating_point() or chosen.ndim != 2:
                raise _unknown(f"{type(experts).__name__} is not called with the experts of each token")
            layers.append(chosen)

        def note_step(*_: Any) -> None:
            shape = RoutingShape(len(layers), layers[0].shape[1], self._experts[0].num_experts)
            device = layers[-1].device  # layers may lie on several
            steps.append(torch.stack([layer.to(device, shape.dtype) for layer in layers], dim=1).cpu())
            layers.clear()

        with contextlib.ExitStack() as hooks:
            for module in self._experts:
                hooks.callback(module.register_forward_pre_hook(note_layer).remove)
            hooks.callback(self._model.register_forward_hook(note_step).remove)
            yield steps


def with_routing(
    responses: Sequence[Response], prompts: Sequence[PromptInputs], passes: Sequence[Tensor]
) -> list[Response]:
    """Add the routing to each response of a batch.

    Args:
        responses: B responses.
        prompts: Their prompts, which were padded on the left in the batch.
        passes: The list of :meth:`RoutingRecorder.recording`. It has no entry for the last column, which no forward
            pass has read.
    """
    rows = torch.cat([step.view(len(responses), -1, *step.shape[1:]) for step in passes], dim=1)  # [B, S + W - 1, L, K]
    width = max(len(prompt.tokens) for prompt in prompts)
    return [
        replace(response, routing=row[width - len(prompt.tokens) : width + len(response.tokens) - 1])
        for response, prompt, row in zip(responses, prompts, rows, strict=True)
    ]


def _unknown(why: str) -> EngineError:
    return EngineError(
        "The rollout engine cannot record the routing of this model.",
        where="rollout.replay_routing",
        why=f"{why}, in this version of transformers",
        fix="remove rollout.replay_routing, or install the version of transformers that constraints/ lists",
    )
