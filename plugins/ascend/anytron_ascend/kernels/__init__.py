"""Kernels of torch_npu behind the neutral kernel signatures."""
