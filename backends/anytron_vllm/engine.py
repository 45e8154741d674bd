"""Generate with vLLM, in this process and in the processes that vLLM starts for tensor parallelism."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron.task.data.pretrained import load_hf_config, load_tokenizer
from anytron.workers.engines.sampling import StopStrings
from anytron_vllm.installation import require_supported, require_torchvision
from anytron_vllm.options import VllmOptions
from anytron_vllm.requests import ImageTokens, UnderWay, engine_input, sampling_params
from anytron_vllm.routing import RecordedRouting
from anytron_vllm.sleep import SleepMode
from anytron_vllm.start import engine_arguments, set_environment, start_directory
from anytron_vllm.weights import ADAPTER_ID, AdapterDirectory, ExpectedWeights, chunks, put_together, receive_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from anytron.workers.engines.context import EngineContext
    from anytron.workers.engines.device_memory import MemoryUse
    from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response
    from anytron.workers.weights.transfer import WeightOrigin

OTHER_ENGINE = (
    "start the run again with resume=auto and a different version of vLLM, or with rollout.engine=transformers"
)
MERGED = "start the run again with resume=auto and rollout.lora=merged"


class VllmEngine:
    """A rollout engine (:class:`anytron.workers.engines.rollout_engine.RolloutEngine`) on vLLM's ``LLM``.

    One step of vLLM generates one token of every response in progress; between two steps weights can be replaced, and
    requests added and aborted. If a response continues after an update, its tokens so far are computed again, so that
    the following tokens depend on the new weights alone.

    Args:
        context: This process and its run.

    Raises:
        ConfigError: No supported vLLM is installed, or the model takes images and torchvision is missing.
    """

    def __init__(self, context: EngineContext) -> None:
        installation = require_supported()
        config = context.config
        options = VllmOptions.model_validate(config.rollout.options)
        set_environment(options)
        self._image_tokens = ImageTokens.of(load_hf_config(config.model))
        takes_images = self._image_tokens is not None
        if takes_images:
            require_torchvision()
        from vllm import LLM

        self._context = context
        self._vllm_version = installation.version
        self._version: int | None = None
        self._temperature = 1.0
        self._under_way: dict[int, UnderWay] = {}
        self._finished: list[tuple[int, Response]] = []
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        accelerator = context.stack.platform.accelerator
        with start_directory(config, takes_images=takes_images) as directory:
            arguments = engine_arguments(
                config,
                options,
                directory,
                version=installation.version,
                accelerator=accelerator,
                takes_images=takes_images,
            )
            self._llm: Any = LLM(**arguments)
        self._llm.collective_rpc("unlink_anytron_shared_memory")
        self._sleep_mode = SleepMode(self._llm)
        self._expected = ExpectedWeights(config.model)
        self._adapter: AdapterDirectory | None = None
        if config.rollout.lora == "alone":
            assert config.model.lora is not None, "refused before"
            self._adapter = AdapterDirectory(config.model.lora, getattr(torch, config.model.dtype))
        self._routing: RecordedRouting | None = None
        if config.rollout.replay_routing:
            self._routing = RecordedRouting(self._llm.llm_engine, self._expected.modules)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; return at once.

        Raises:
            EngineError: A prompt leaves too little room for its response, a request's temperature differs from the
                temperature of requests in progress, or vLLM sleeps.
        """
        if self._sleep_mode.asleep:
            raise EngineError("vLLM sleeps and takes no requests.", fix="call load_weights before submit")
        for request in requests:
            self._check(request)
        for request in requests:
            self._set_temperature(request.sampling.temperature)
            self._add(str(request.id), request.prompt, sampling_params(request))
            self._under_way[request.id] = UnderWay(request)

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate for at most about ``seconds``, or until a response finishes.

        Returns:
            The id and the response of each request that has finished.

        Raises:
            EngineError: No weights have been loaded, or vLLM aborted a request.
        """
        if self._under_way and self._version is None:
            raise EngineError("The rollout engine has no weights yet.", fix="call load_weights before poll")
        deadline = time.monotonic() + seconds
        while self._under_way and not self._finished:
            self._step()
            if time.monotonic() >= deadline:
                break
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Stop the requests with these ids, all if ``ids`` is None; return their partial responses."""
        chosen = [one for one in (list(self._under_way) if ids is None else ids) if one in self._under_way]
        self._llm.llm_engine.abort_request([str(one) for one in chosen])
        return [(one, self._under_way.pop(one).response("abort")) for one in chosen]

    def load_weights(self, origin: WeightOrigin) -> int:
        """Load new weights, and return their version. All are received and verified before vLLM loads the first one.

        Raises:
            EngineError: A tensor is missing, unknown, or misshapen: the old weights stay in use. Or vLLM could not load
                the verified weights: then the engine cannot be used any more.
            TransferError: The weights did not arrive as they were sent: the old ones stay in use.
        """
        with origin.open() as received:
            weights, version = receive_all(received, self._expected), received.version
        self._version = None  # never generate with half-loaded weights
        self._sleep_mode.wake_weights()
        try:
            self._llm.collective_rpc("start_anytron_update")
            for chunk in chunks(weights):
                self._llm.collective_rpc("load_anytron_weights", args=(chunk,))
            self._llm.collective_rpc("finish_anytron_update")
        except (KeyError, RuntimeError, ValueError) as error:  # RuntimeError: also of another process, as text
            raise EngineError(
                "vLLM could not load the weights.", where=f"version {version}", why=str(error), fix=OTHER_ENGINE
            ) from error
        self._sleep_mode.wake_cache()
        self._empty_caches()
        self._version = version
        return version

    def sleep(self) -> MemoryUse:
        """Free the device's memory, weights and cache; :meth:`load_weights` wakes vLLM up.

        Raises:
            EngineError: Requests are being generated, or vLLM does not sleep.
        """
        self._refuse_requests("sleep")
        self._version = None
        return self._sleep_mode.sleep()

    def load_adapter(self, origin: WeightOrigin) -> int:
        """Unload the previous adapter, load a new one, and return its version.

        Raises:
            EngineError: vLLM could not load the adapter; the engine cannot generate any more.
            TransferError: The adapter did not arrive as it was sent: the old one stays in use.
        """
        assert self._adapter is not None, "rollout.lora is alone"
        with origin.open() as received:
            (tensors, _), version = put_together(received), received.version
        self._version = None
        sent, engine = self._adapter.write(tensors), self._llm.llm_engine
        engine.remove_lora(ADAPTER_ID)  # otherwise vLLM keeps the adapter that it has under this number
        try:
            engine.add_lora(self._lora_request())
        except (KeyError, RuntimeError, ValueError) as error:
            raise EngineError(
                "vLLM could not load the adapter.",
                where=f"adapter of version {version}",
                why=str(error),
                fix=MERGED,
            ) from error
        self._empty_caches()
        for held in self._llm.collective_rpc("anytron_adapter_checksums", args=(ADAPTER_ID,)):
            if held != sent:
                lost = Counter(sent) - Counter(held)  # not sets: equal tensors have equal checksums
                why = (
                    f"{lost.total()} of the {len(sent)} tensors that were sent differ or are missing; "
                    f"vLLM has {len(held)} tensors"
                )
                raise EngineError(
                    "vLLM has a different adapter than the one that was sent.",
                    where=f"version {version}",
                    why=why,
                    fix=MERGED,
                )
        self._version = version
        return version

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Return each sequence's log-probs of all tokens, float32 ``[tokens, vocabulary]``, as vLLM returns no logits.

        Raises:
            EngineError: Requests are being generated, or no weights have been loaded.
        """
        if self._version is None:
            raise EngineError("The rollout engine has no weights yet.", fix="call load_weights before logits")
        from vllm import SamplingParams

        self._refuse_requests("compute logits")
        self._set_temperature(1.0)
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=-1, logprobs=-1, flat_logprobs=True, detokenize=False, ignore_eos=True
        )
        for place, sequence in enumerate(sequences):
            self._add(str(place), sequence, params)
        outputs: list[Any] = []
        while len(outputs) < len(sequences):
            outputs += [output for output in self._llm.llm_engine.step() if output.finished]
        outputs.sort(key=lambda output: int(output.request_id))
        width = self._llm.model_config.get_vocab_size()
        # The first token has no log-probs; those after the last one belong to the token that is generated.
        return [
            torch.cat([_rows(one.prompt_logprobs, width)[1:], _rows(one.outputs[0].logprobs, width)]) for one in outputs
        ]

    def describe(self) -> Mapping[str, Any]:
        """Return the engine, its versions, the device, and the patches of this process."""
        import transformers

        return {
            "engine": "vllm",
            "model": self._llm.model_config.architecture,
            "device": str(self._context.stack.platform.runtime().current_device()),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "vllm": self._vllm_version,
            },
            "patches": self._context.stack.ledger.report(),
        }

    def close(self) -> None:
        """End vLLM and the processes that it has started."""
        self._llm.llm_engine.engine_core.shutdown()
        if self._adapter is not None:
            self._adapter.delete()

    def _add(self, number: str, prompt: PromptInputs, params: Any) -> None:
        arguments = number, engine_input(prompt, self._image_tokens), params
        self._llm.llm_engine.add_request(*arguments, lora_request=self._lora_request())

    def _empty_caches(self) -> None:
        """Empty the caches of prefixes, of responses in progress and of images, which old weights have filled.

        Raises:
            EngineError: vLLM did not empty its cache.
        """
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=bool(self._under_way)):
            raise EngineError(
                "vLLM did not empty its cache of keys and values, which old weights have filled.",
                where="reset_prefix_cache",
                why="responses of the new weights would depend on it",
                fix="start the run again with resume=auto; if this happens again, set rollout.engine=transformers",
            )
        self._llm.llm_engine.reset_encoder_cache()

    def _lora_request(self) -> Any:
        """Return vLLM's description of the adapter; None if adapters are merged."""
        from vllm.lora.request import LoRARequest

        return None if self._adapter is None else LoRARequest("anytron", ADAPTER_ID, str(self._adapter.path))

    def _check(self, request: GenerationRequest) -> None:
        prompt, longest = len(request.prompt.tokens), request.sampling.max_new_tokens
        limit = self._llm.model_config.max_model_len
        if prompt + longest > limit:
            raise EngineError(
                "A prompt leaves too little room for its response.",
                where=f"request {request.id}",
                why=f"the prompt has {prompt} tokens and the response up to {longest}, but vLLM allows {limit} in all",
                fix="raise rollout.options.max_model_len, lower rollout.max_new_tokens, or use shorter prompts",
            )

    def _refuse_requests(self, what: str) -> None:
        if self._under_way:
            raise EngineError(
                f"Cannot {what} while requests are being generated.", fix="poll or abort the requests first"
            )

    def _set_temperature(self, temperature: float) -> None:
        if temperature == self._temperature:
            return
        if self._under_way:
            raise EngineError(
                "The temperature cannot change while requests are being generated.",
                why=f"they are sampled at {self._temperature:g}, and the new value is {temperature:g}",
                fix="poll or abort the requests first",
            )
        self._llm.collective_rpc("set_anytron_temperature", args=(temperature,))
        self._temperature = temperature

    def _step(self) -> None:
        """Generate one token of each response that vLLM has room for."""
        assert self._version is not None, "poll makes sure of it"
        grown = []
        for output in self._llm.llm_engine.step():
            one, (new,) = self._under_way[int(output.request_id)], output.outputs
            if new.finish_reason not in (None, "stop", "length"):
                raise EngineError(
                    "vLLM aborted a request.",
                    where=f"request {output.request_id}",
                    why=f"its finish_reason is {new.finish_reason}",
                    fix="read the log of this process for vLLM's own error; resume the run with resume=auto",
                )
            log_probs = [entry[token].logprob for entry, token in zip(new.logprobs, new.token_ids, strict=True)]
            one.extend(new.token_ids, log_probs, self._version, ended=output.finished)
            if self._routing is not None and output.finished:
                one.routing = self._routing.of_ended(new)
            grown.append(one)
        stopped = self._stopped(grown)
        for one in stopped:
            if self._routing is not None and not one.ended:
                one.routing = self._routing.of_running(str(one.request.id))
        # vLLM does not know yet that they are over.
        self._llm.llm_engine.abort_request([str(one.request.id) for one in stopped if not one.ended])
        for one in grown:
            if one.ended or one in stopped:
                self._finish(one, stopped=one in stopped)

    def _finish(self, one: UnderWay, *, stopped: bool) -> None:
        end = one.tokens[-1] in one.request.sampling.end_token_ids
        response = one.response("stop" if stopped or end else "length")
        self._finished.append((one.request.id, response))
        del self._under_way[one.request.id]

    def _stopped(self, grown: Iterable[UnderWay]) -> set[UnderWay]:
        """Find the responses that show a stop string; vLLM's own search would decode tokens in another way."""
        by_strings: dict[tuple[str, ...], list[UnderWay]] = {}
        for one in grown:
            sampling = one.request.sampling
            if sampling.stop and len(one.tokens) >= sampling.min_new_tokens:
                by_strings.setdefault(sampling.stop, []).append(one)
        found = set()
        for strings, members in by_strings.items():
            if strings not in self._stop_strings:
                self._stop_strings[strings] = StopStrings(strings, load_tokenizer(self._context.config.model))
            search = self._stop_strings[strings]
            shown = search.shown([one.tokens[-search.tail :] for one in members])
            found |= {one for one, ends in zip(members, shown, strict=True) if ends}
        return found


def _rows(log_probs: Any, width: int) -> Tensor:
    """Arrange vLLM's log-probs (``FlatLogprobs``) by token id: float32 ``[positions, width]``."""
    tokens = torch.tensor(log_probs.token_ids, dtype=torch.int64)
    values = torch.tensor(log_probs.logprobs, dtype=torch.float32)
    rows = torch.full((len(log_probs), width), -torch.inf)
    lengths = torch.tensor(log_probs.end_indices) - torch.tensor(log_probs.start_indices)
    return rows.index_put_((torch.repeat_interleave(lengths), tokens), values)
