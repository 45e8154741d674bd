"""vLLM's sleep mode: its device memory is free while other processes train (``rollout.sleep``). Imports no vLLM.

vLLM keeps weights and cache in a memory pool of its own. Level 2 discards both. Level 1 would keep the weights on the
host, but the next update replaces all of them anyway. What level 2 must not lose:

- buffers that are not sent (rotary tables, scales of the cache): vLLM saves them, and writes them back when weights
  wake up (vllm/v1/worker/gpu_worker.py, ``_sleep_saved_buffers``). In 0.23 that happens at the first waking, whatever
  its tag is; so weights must wake up before the cache.
- parts of ``kv_b_proj`` in latent attention: each update makes them anew, and :mod:`anytron_vllm.kept` compares them.

Memory wakes up at the same addresses, at which kernels and recorded graphs expect it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from anytron.base.errors import EngineError
from anytron.workers.engines.device_memory import MemoryUse

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVEL = 2
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
"""vLLM's names of what sleeps, in the order of waking up: the cache needs no memory while weights arrive."""


class SleepMode:
    """Puts one vLLM to sleep, and wakes it up.

    Args:
        llm: vLLM's ``LLM``, started with ``enable_sleep_mode``.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._asleep: list[Tag] = []

    @property
    def asleep(self) -> Sequence[Tag]:
        """What sleeps."""
        return tuple(self._asleep)

    def sleep(self) -> MemoryUse:
        """Discard weights and cache. vLLM must have no requests.

        Returns:
            What the workers' devices have gained; torch does not know the peak in vLLM's memory pool.

        Raises:
            EngineError: vLLM says that it does not sleep.
        """
        before = self._free_bytes()
        for tag in TAGS:  # after a failed update only the cache may be asleep, and vLLM discards both at a time
            self._wake(tag)
        self._llm.sleep(level=LEVEL)
        self._asleep = list(TAGS)
        self._check(expected=True)
        return MemoryUse(None, max(0, self._free_bytes() - before))

    def wake_weights(self) -> None:
        """Give vLLM memory for its weights, which hold nothing yet; nothing happens if it has this memory."""
        self._wake("weights")

    def wake_cache(self) -> None:
        """Give vLLM memory for its cache, after the weights have been loaded.

        Raises:
            EngineError: vLLM says that it still sleeps.
        """
        assert "weights" not in self._asleep, "load_weights wakes them first"
        if self._asleep:
            self._wake("kv_cache")
            self._check(expected=False)

    def _wake(self, tag: Tag) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def _check(self, *, expected: bool) -> None:
        if self._llm.llm_engine.is_sleeping() != expected:
            raise EngineError(
                f"vLLM {'does not sleep' if expected else 'still sleeps'}.",
                where="rollout.sleep",
                why=f"is_sleeping() says {not expected} after {'sleep' if expected else 'wake_up'}",
                fix="set rollout.sleep=false",
            )

    def _free_bytes(self) -> int:
        return sum(self._llm.collective_rpc("anytron_free_bytes"))
