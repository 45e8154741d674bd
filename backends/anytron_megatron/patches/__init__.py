"""The patches of the Megatron backend: ``catalog`` describes each one, and the other files hold their code.

No patch here names a device; the platform decides which of them it needs.
"""

from anytron_megatron.patches.selection import trainer_patches

__all__ = ["trainer_patches"]
