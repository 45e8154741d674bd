"""The list of faults: each kind of process killed in each phase of a step, and everything else that ends runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.faults.faults import (
    Fault,
    close_output,
    damage_manifest,
    flip_a_bit,
    in_a_ray_cluster,
    lose_a_file,
    nobody_looked_at_the_clock,
    replace_pickles,
    second_run,
    truncate,
    with_jumping_clocks,
)
from tests.faults.saboteur import Blow

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.run import Run

PHASES = {
    "weight exchange": "trainer.export_weights",
    "rollout": "rollout.poll",
    "reward": "reward.score",
    "score": "trainer.score",
    "update": "trainer.update",
    "resuming": "trainer.load_checkpoint",
    "saving": "trainer.written_files",
}
"""The call with which a phase begins, in the order in which a run meets them that is struck in its third step."""
SAVED_ONCE = 3
"""Steps in ``metrics.jsonl`` when the second checkpoint is begun, at the earliest."""
DRIVER, RANK, ROLLOUT, REWARD = "driver", "trainer-0", "rollout-0", "reward-0"
CALLED = {DRIVER: "driver", RANK: "rank", ROLLOUT: "rollout", REWARD: "reward"}
MANY_RESTARTS = ("trainer.max_restarts=100",)
QUICK_PULSE = ("executor.heartbeat_timeout_s=5",)
SOON = ("executor.stall_timeout_s=5",)
TWO_RANKS = ("parallel.data_parallel_size=2",)
RANKS_GENERATE = ("rollout.engine=megatron",)


def _kill(victim: str, phase: str) -> Blow:
    return Blow(PHASES[phase], "kill", victim, SAVED_ONCE if phase == "saving" else 2)


def _killed(*victims_and_phases: tuple[str, str], ends: str = "goes on") -> Fault:
    names = tuple(f"{CALLED[victim]} killed, {phase}" for victim, phase in victims_and_phases)
    blows = tuple(_kill(victim, phase) for victim, phase in victims_and_phases)
    return Fault(names, blows, ends, settings=MANY_RESTARTS)


def _struck(name: str, blow: Blow, ends: str = "goes on", **more: Any) -> Fault:
    return Fault((name,), (blow,), ends, **more)


def _damaged(how: str, damage: Callable[[Run], None]) -> Fault:
    # There are two checkpoints, of the steps 2 and 3, when the run is killed: the one before serves.
    blow = Blow("trainer.update", "kill", DRIVER, 3)
    return _struck(f"checkpoint {how}", blow, "killed", between=damage, settings=("checkpoint.every_steps=1",))


FAULTS = (
    _killed(*((DRIVER, phase) for phase in PHASES), ends="killed"),
    _struck("driver killed, first saving", Blow(PHASES["saving"], "kill", DRIVER, 1), "killed"),
    _killed(*((RANK, phase) for phase in PHASES if phase != "update")),
    # A rollout process that has nothing to do is missed in the next step.
    _killed(*((ROLLOUT, phase) for phase in ("weight exchange", "rollout", "reward", "score"))),
    _killed(*((ROLLOUT, phase) for phase in ("update", "saving"))),
    _killed((RANK, "update"), (ROLLOUT, "resuming")),
    _killed(*((REWARD, phase) for phase in ("rollout", "reward", "update"))),
    _struck("one rank of two killed, update", Blow("trainer.update", "kill"), layout=TWO_RANKS),
    _struck("one rank of two skips a call, update", Blow("trainer.update", "skip"), settings=SOON, layout=TWO_RANKS),
    _struck("rank killed, generating", Blow("trainer.poll", "kill"), layout=RANKS_GENERATE),
    _struck("driver killed, ranks generating", Blow("trainer.poll", "kill", DRIVER), "killed", layout=RANKS_GENERATE),
    _struck("node of a Ray cluster lost, update", Blow("trainer.update", "lose node"), begin=in_a_ray_cluster),
    _struck("rank stopped, update", Blow("trainer.update", "stop"), settings=QUICK_PULSE),
    _struck("rollout stopped, rollout", Blow("rollout.poll", "stop"), settings=QUICK_PULSE),
    _struck("reward hangs", Blow("reward.score", "hang"), settings=("rewards[0].timeout_s=3",)),
    _struck("reward raises", Blow("reward.score", "raise")),
    _struck("reward gives NaN for all samples", Blow("reward.score", "nan"), "error"),
    _struck("reward calls exit", Blow("reward.score", "exit")),
    _struck("reward ends its process", Blow("reward.score", "leave")),
    _struck(
        "reward raises, and the run is to stop then",
        Blow("reward.score", "raise"),
        "error",
        says="the judge does not answer",
        settings=("rewards[0].on_error=stop",),
    ),
    *(
        _struck(f"{fault}, rank saving", Blow("trainer.save_checkpoint", fault, RANK, SAVED_ONCE), "error")
        for fault in ("full disk", "no descriptors")
    ),
    *(
        _struck(f"{fault}, driver", Blow("trainer.update", fault, DRIVER), "error")
        for fault in ("full disk", "no descriptors")
    ),
    _damaged("with half a file", truncate),
    _damaged("with a flipped bit", flip_a_bit),
    _damaged("without a file", lose_a_file),
    _damaged("with half a manifest", damage_manifest),
    _damaged("with malicious pickles", replace_pickles),
    _struck("SIGTERM", Blow("trainer.update", "terminate", DRIVER), "saved"),
    _struck("SIGUSR1", Blow("rollout.poll", "user1", DRIVER), "saved"),
    Fault(("second run in the directory",), begin=second_run),
    Fault(("output closed",), begin=close_output),
    Fault(("clocks jump",), begin=with_jumping_clocks, between=nobody_looked_at_the_clock),
)
