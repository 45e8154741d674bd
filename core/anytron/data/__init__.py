"""Prompts: where they come from, in which order, and as which tokens."""

from anytron.data.prompts import Prompt

__all__ = ["Prompt"]
