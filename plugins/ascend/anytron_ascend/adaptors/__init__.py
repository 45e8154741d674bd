"""Adaptors, which adapt Megatron to NPUs, one file each; the engine or ``platform.options.adaptor`` chooses one."""
