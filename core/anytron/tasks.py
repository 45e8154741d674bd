"""Public types for functions and classes that a configuration names: their arguments and results."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.algorithms.advantages import compare
    from anytron.algorithms.contract import AdvantageFunction, Advantages, PolicyTokens, TokenLosses
    from anytron.config.algorithm import AlgorithmSection
    from anytron.record.sinks import MetricSink, SinkRun
    from anytron.task.data import Prompt
    from anytron.task.environments import AgentResult, AgentTask, Observation, Task, Turn
    from anytron.task.rewards import Sample
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "AdvantageFunction",
    "Advantages",
    "AgentResult",
    "AgentTask",
    "AlgorithmSection",
    "MetricSink",
    "Observation",
    "PolicyTokens",
    "Prompt",
    "Sample",
    "SinkRun",
    "Task",
    "TokenLosses",
    "Turn",
    "compare",
]
