"""What the Megatron backend changes in third-party code, as data.

None of these patches names a device: two of them ask the platform whether it wants them.
"""

from anytron_megatron.patches.catalog import OWNER, trainer_patches

__all__ = ["OWNER", "trainer_patches"]
