"""Kernels of torch_npu with the neutral kernel signatures."""
