"""Environments of the library verifiers, run with the model's own tokens.

Set ``data.source: anytron_verifiers:prompts`` and ``environment.path: anytron_verifiers:VerifiersEnvironment`` (from
verifiers 0.4 on ``environment.agent: anytron_verifiers:solve``), and give both the same options ``name`` and ``args``;
see docs/how-to/use-tools-and-environments.md and train-an-agent.md. Importing this package does not import verifiers.
"""

from anytron_verifiers.agent import solve
from anytron_verifiers.environment import VerifiersEnvironment
from anytron_verifiers.source import prompts

__all__ = ["VerifiersEnvironment", "prompts", "solve"]
