"""Prompts: where they come from, in which order, and as which tokens."""

from anytron.task.data.prompts import Prompt

__all__ = ["Prompt"]
