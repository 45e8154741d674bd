"""What the Megatron backend changes in third-party code: a catalog of patches, and one file for each fix.

None of these patches names a device; the platform says which of them it needs.
"""

from anytron_megatron.patches.selection import trainer_patches

__all__ = ["trainer_patches"]
