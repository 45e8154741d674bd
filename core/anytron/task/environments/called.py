"""How an environment of a user is called."""

from __future__ import annotations

from anytron.base.functions import Called, Kind, has
from anytron.task.environments.protocol import Observation, Task, Turn

MADE = Called(
    "An environment's class",
    given="the entries of environment.options are its keyword arguments",
    gives="an object with methods reset and step",
)
RESET = Called("An environment's method reset", ("task",), f"task is a Task, and {has(Task)}", method="reset")
STEP = Called(
    "An environment's method step",
    ("turn",),
    f"turn is a Turn, and {has(Turn)}; answer any text of the model with an Observation",
    f"an anytron.task.environments.Observation ({has(Observation)})",
    method="step",
)
CLOSE = Called("An environment's method close", method="close", optional=True)
ENVIRONMENT_PATH = Kind("environment.path", MADE, (RESET, STEP, CLOSE), options=True)
