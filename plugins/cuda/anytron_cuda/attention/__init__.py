"""Attention on NVIDIA GPUs: which kernel a layer takes, and an adapter for each library."""
