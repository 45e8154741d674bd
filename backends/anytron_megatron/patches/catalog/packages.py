"""The packages that patches change, as their distributions name them, and the package that holds the fixes."""

FIXES = "anytron_megatron.patches"
MEGATRON = "megatron-core"
BRIDGE, BRIDGE_VERSIONS = "mcore-bridge", ">=1.6.5,<1.7"
