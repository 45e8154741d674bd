"""Attention on NVIDIA GPUs: the choice of a layer's kernel, and an adapter for each library."""
