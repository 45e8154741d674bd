"""Reference kernels in pure torch: the neutral defaults of the kernel hooks, right on every device."""
