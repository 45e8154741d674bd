"""Adaptors of Megatron to the NPU, one file each; the engine or ``platform.options.adaptor`` chooses."""
