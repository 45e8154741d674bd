"""Estimate the memory of a training rank from the configuration and the names and shapes of tensors. No Megatron."""
