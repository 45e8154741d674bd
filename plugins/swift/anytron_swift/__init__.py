"""Megatron-SWIFT on the platforms of Anytron, without a change of ms-swift.

ms-swift loads no plugins. So users start ``anytron-swift sft ...`` instead of ``megatron sft ...``: it opens Anytron's
device stack, and then runs ms-swift's own command in it, with Anytron's masks for padded rows.
"""
