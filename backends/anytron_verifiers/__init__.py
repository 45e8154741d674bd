"""Environments of the library verifiers, run with the model's own tokens.

Set ``environment.path: anytron_verifiers:VerifiersEnvironment`` and ``data.source: anytron_verifiers:prompts``, and
give both the same options ``name`` and ``args``; see docs/how-to/use-tools-and-environments.md. Importing this package
does not import verifiers.
"""

from anytron_verifiers.environment import VerifiersEnvironment
from anytron_verifiers.source import prompts

__all__ = ["VerifiersEnvironment", "prompts"]
