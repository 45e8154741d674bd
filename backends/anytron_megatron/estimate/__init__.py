"""Estimate a training rank's memory from the configuration and the shapes of tensors. Imports no Megatron."""
