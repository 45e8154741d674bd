"""Megatron-LM's own unit tests and scripts on Anytron's device stack, unedited (``tox -e megatron-suite``)."""

VARIABLE = "ANYTRON_MEGATRON_LM"
"""Environment variable that names a checkout of Megatron-LM, with the version of the installed megatron-core."""
