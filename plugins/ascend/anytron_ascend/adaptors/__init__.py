"""What adapts Megatron to the NPU, one file each; ``platform.options.adaptor`` chooses."""
