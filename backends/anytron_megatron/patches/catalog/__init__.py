"""List the changes that the Megatron backend makes to third-party code: each is a constant in the file of its subject.

The code of a patch is in the file that its ``replacement`` or ``install`` names; these files import none of it.
Version ranges are measured: the tests show each fault on an affected version, and that the patch is skipped on the
others (``tox -e mcore012,mcore013,mcore014,mcore015,mcore016,mcore017,mcore018,mcore019``).
"""

FIXES = "anytron_megatron.patches"
MEGATRON = "megatron-core"
BRIDGE, BRIDGE_VERSIONS = "mcore-bridge", ">=1.6.5,<1.7"
