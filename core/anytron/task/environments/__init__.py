"""Environments, which answer the model during a response: a tool, a game, a user.

An environment is a class with two methods::

    from anytron.tasks import Observation, Task, Turn

    class Echo:
        def reset(self, task: Task) -> None:
            self.left = 3

        def step(self, turn: Turn) -> Observation:
            self.left -= 1
            if not self.left:
                return Observation(done=True, reward=1.0)
            return Observation(text=turn.text)

The configuration names it by import path (``environment.path``); its keyword arguments are ``environment.options``.
"""

from anytron.task.environments.protocol import AgentResult, AgentTask, Environment, Observation, Task, Turn

__all__ = ["AgentResult", "AgentTask", "Environment", "Observation", "Task", "Turn"]
