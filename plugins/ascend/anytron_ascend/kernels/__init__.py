"""Kernels of torch_npu with the signatures of the kernels in :mod:`anytron.kernels`."""
