"""The patches of the Megatron backend: a catalog of constants by subject, and the fixes in files by subject.

No patch here names a device; the platform decides which of them it needs.
"""

from anytron_megatron.patches.selection import trainer_patches

__all__ = ["trainer_patches"]
