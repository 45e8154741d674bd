"""As much of an installed vLLM as checks read, which import none; and a stand-in for an ``LLM`` that can sleep.

The stand-in's methods have the parameters of the real ones (tests/backends/vllm/test_sleep.py compares them), and it
fails where an accelerator would: on memory that is not there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, version: str, *, torchvision: bool = False) -> None:
    """Write it into a folder of packages."""
    models = folder / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('the checks import no vLLM')")
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    if torchvision:
        (folder / "torchvision").mkdir()
        (folder / "torchvision" / "__init__.py").write_text("raise ImportError('the checks import no torchvision')")
    (models / "registry.py").write_text(
        "_TEXT_GENERATION_MODELS = {'Qwen3ForCausalLM': ('qwen3', 'Q'), 'Qwen3MoeForCausalLM': ('qwen3_moe', 'M'),"
        " 'OtherForCausalLM': ('o', 'O')}\n"
        "_MULTIMODAL_MODELS = {'Qwen2_5_VLForConditionalGeneration': ('qwen2_5_vl', 'V')}\n"
        "_EMBEDDING_MODELS = {'OnlyEmbeds': ('e', 'E')}\n"
    )


class AsleepError(RuntimeError):
    """Memory that was discarded has been used."""


class SleepingEngine:
    """The part of vLLM's ``LLMEngine`` that the rollout engine uses while and after vLLM sleeps."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.requests: list[str] = []
        self.weights: dict[str, Any] | None = None  # None = memory with no meaning
        self.calls: list[str] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        **others: Any,
    ) -> str:
        if self.asleep:
            raise AsleepError("a request came")
        self.requests.append(request_id)
        return request_id

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        self.requests = [one for one in self.requests if one not in request_ids]

    def step(self) -> list[Any]:
        """End each request with one token, if there are weights and a cache."""
        if self.asleep or self.weights is None:
            raise AsleepError("a step was made")
        self.calls.append("step")
        ended, self.requests = self.requests, []
        chosen = {5: SimpleNamespace(logprob=-1.0)}
        one = SimpleNamespace(finish_reason="length", token_ids=[5], logprobs=[chosen])
        return [SimpleNamespace(request_id=number, outputs=[one], finished=True) for number in ended]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if "kv_cache" in self.asleep:
            raise AsleepError("the cache was emptied")
        return True

    def reset_encoder_cache(self) -> None:
        pass


class SleepingLLM:
    """A stand-in for vLLM's ``LLM``: weights and cache of 6 and 4 bytes on a device of 20 bytes."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.llm_engine = SleepingEngine()
        self.model_config = SimpleNamespace(max_model_len=512, get_num_experts=lambda: 0)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        engine = self.llm_engine
        if not self.arguments.get("enable_sleep_mode"):
            raise ValueError("Sleep mode is not enabled")
        if engine.asleep or engine.requests:
            raise AsleepError("vLLM was put to sleep again, or with requests")
        engine.calls.append(f"sleep {level}")
        engine.asleep = {"weights", "kv_cache"}
        engine.weights = engine.weights if level == 1 else None

    def wake_up(self, tags: list[str] | None = None) -> None:
        engine = self.llm_engine
        for tag in tags or ["weights", "kv_cache"]:
            engine.calls.append(f"wake {tag}")
            if tag == "kv_cache" and "weights" in engine.asleep:  # 0.23 writes buffers back at any waking
                raise AsleepError("the cache woke up first")
            engine.asleep.discard(tag)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        return [getattr(self, method, lambda *_: None)(*args)]

    def start_anytron_update(self) -> None:
        self.llm_engine.calls.append("update")
        if "weights" in self.llm_engine.asleep:
            raise AsleepError("an update began")
        self.arriving: dict[str, Any] = {}

    def load_anytron_weights(self, weights: dict[str, Any]) -> None:
        self.arriving |= weights

    def finish_anytron_update(self) -> None:
        self.llm_engine.weights = self.arriving

    def anytron_free_bytes(self) -> int:
        held = {"weights": 6, "kv_cache": 4}
        return 20 - sum(size for tag, size in held.items() if tag not in self.llm_engine.asleep)
