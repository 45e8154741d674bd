"""A replica of the rollout: one Ray actor that holds the model, and batches the requests that wait."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from anytron import ConfigError, EngineError
from anytron.engines import RequestQueue, derive_seed
from anytron_verl import ROLLOUT, process
from anytron_verl.rollout.generation import Generation, NamedWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.engines import Response

ARRIVAL_S = 0.02
"""A batch begins when no request has arrived for this many seconds: agent loops send requests one by one."""


def server_name(replica_rank: int) -> str:
    """The name of a replica's server among Ray's actors."""
    return f"{ROLLOUT}_server_{replica_rank}_0"


class TransformersServer:
    """Answers requests; verl's clients and its managers of replicas call it, as they call vLLM's server.

    Args:
        config: verl's ``RolloutConfig``.
        model_config: ``actor_rollout_ref.model``.
        replica_rank: Rank of this replica.

    Raises:
        AnytronError: The settings need a feature that this rollout lacks.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        self._config = config
        self._seed = config.seed + replica_rank
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        device = process.stack().platform.runtime().current_device()
        self._generation = Generation(config, model, device)
        self._queue = RequestQueue()
        self._answers: dict[int, asyncio.Future[Response]] = {}
        self._count = 0
        self._work: asyncio.Task[None] | None = None
        self._model_in_use = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._rejects = False
        self._interruption = threading.Event()
        self._arrived: list[tuple[str, Tensor]] = []
        self._global_steps: int | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **further: Any
    ) -> TokenOutput:
        """Answer a prompt.

        Args:
            prompt_ids: Token ids.
            sampling_params: Sampling parameters under vLLM's names (:meth:`Generation.request`).
            request_id: verl's id of the request; ignored.
            further: Images, videos, sound: must be None.

        Raises:
            EngineError: The request needs a feature that this rollout lacks.
        """
        del request_id
        if given := sorted(name for name, value in further.items() if value is not None):
            raise EngineError(
                "verl's rollout 'transformers' reads text only.",
                where="generate",
                why=f"the request also has {', '.join(given)}",
                fix="remove images, videos and sound from the prompts, or install vllm and set "
                "actor_rollout_ref.rollout.name=vllm",
            )
        while not self._open.is_set():
            if self._rejects:
                return self._output((), None, "aborted")
            await self._open.wait()
        self._count += 1
        seed = derive_seed(self._seed, ROLLOUT, self._count)
        prompt = tuple(normalize_token_ids(prompt_ids))
        request = self._generation.request(self._count, prompt, sampling_params, seed)
        answer = self._answers[request.id] = asyncio.get_running_loop().create_future()
        self._queue.add([request])
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_all())
        response = await answer
        log_probs = response.log_probs if sampling_params.get("logprobs") else None
        return self._output(response.tokens, log_probs, "aborted" if response.stop_reason == "abort" else "completed")

    async def load_weights(self, bucket: Sequence[tuple[str, Tensor]], *, last: bool, global_steps: int | None) -> None:
        """Receive a bucket of the new weights; the model uses them after the last bucket.

        Args:
            bucket: Whole tensors on the host by their Hugging Face names.
            last: Whether this is the last bucket.
            global_steps: verl's number of updates, which responses are marked with; None keeps the previous number.

        Raises:
            EngineError: A tensor is missing, unknown, or of another shape.
        """
        self._arrived += bucket
        if not last:
            return
        tensors, self._arrived = self._arrived, []
        async with self._model_in_use:
            self._global_steps = self._global_steps if global_steps is None else global_steps
            await asyncio.to_thread(self._generation.load_weights, NamedWeights(self._global_steps or 0, tensors))

    async def abort_all_requests(self, *, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with their tokens so far, and accept no others before :meth:`resume_generation`.

        Args:
            reject_request: Whether to answer requests that arrive meanwhile with an empty response; otherwise they
                wait.
        """
        self._rejects = reject_request
        self._open.clear()
        self._interruption.set()
        aborted = len(self._answers)
        for number, response in self._queue.abort():
            self._answers.pop(number).set_result(response)
        if self._work is not None:
            await asyncio.wait([self._work])
        self._interruption.clear()
        return {"aborted_count": aborted}

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self._rejects = False
        self._open.set()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: :meth:`sleep` has released no memory."""

    async def sleep(self) -> None:
        """Wait for requests in progress, and release no memory: the memory of a CPU holds both models."""
        async with self._model_in_use:
            pass

    async def clear_kv_cache(self) -> None:
        """Do nothing: no cache outlives its batch."""

    async def release_kv_cache(self) -> None:
        """Do nothing: no cache outlives its batch."""

    async def resume_kv_cache(self) -> None:
        """Do nothing: no cache outlives its batch."""

    async def _answer_all(self) -> None:
        while self._answers:
            waiting = -1
            while waiting < len(self._answers) < self._config.max_num_seqs:
                waiting = len(self._answers)
                await asyncio.sleep(ARRIVAL_S)
            batch = self._queue.take(self._config.max_num_seqs)
            if not batch:
                continue
            try:
                async with self._model_in_use:
                    found = await asyncio.to_thread(self._generation.generate, batch, self._interruption)
            except Exception as error:  # noqa: BLE001 - whoever waits for an answer is told
                for request in batch:
                    self._answers.pop(request.id).set_exception(error)
            else:
                for request, response in zip(batch, found, strict=True):
                    self._answers.pop(request.id).set_result(response)

    def _output(self, tokens: Sequence[int], log_probs: Sequence[float] | None, reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=list(tokens),
            log_probs=None if log_probs is None else list(log_probs),
            stop_reason=reason,
            extra_fields={"global_steps": self._global_steps},
        )


class TransformersReplica(RolloutReplica):  # type: ignore[misc]
    """The replica of ``actor_rollout_ref.rollout.name=transformers``: one server beside each training worker."""

    async def launch_servers(self) -> None:
        """Start the server on the machine, and with the devices, of its training worker.

        Raises:
            ConfigError: The server is for a model other than the trained policy, or its replica has several workers.
        """
        if self.rollout_mode is not RolloutMode.HYBRID or self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                "verl's rollout 'transformers' works only beside training workers.",
                where="actor_rollout_ref.rollout.name",
                why="it receives weights from training workers only, and cannot serve reward models and teachers",
                fix="for the policy, set trainer.v1.trainer_mode=sync actor_rollout_ref.hybrid_engine=True; for "
                "other models, use the rollout vllm",
            )
        platform = get_platform()
        resource = platform.ray_resource_name()
        node, devices = await self.workers[0].__ray_call__.remote(_place, resource)
        variables = dict.fromkeys(platform.ray_noset_envvars(), "1")
        variables[platform.visible_devices_envvar()] = ",".join(devices)
        name = server_name(self.replica_rank)
        server: Any = ray.remote(TransformersServer).options(
            name=name,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": {**variables, **platform.rollout_env_vars()}},
            max_concurrency=self.max_concurrency,
        ).remote(self.config, self.model_config, self.replica_rank)  # fmt: skip
        await server.__ray_ready__.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, name


def _place(_worker: Any, resource: str) -> tuple[str, list[str]]:
    """Ray's ids of this worker's machine and devices."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[resource]
