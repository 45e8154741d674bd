"""Transformer Engine's Python API in pure torch, so that Megatron's TE wrappers run on any device.

Megatron's and the bridge's models are built from Transformer Engine modules, which compute on CUDA
devices only. :func:`anytron_megatron.portable_te.alias.install` puts this package under the name
``transformer_engine``; Megatron's wrappers (``TELinear``, ``TEDotProductAttention``, ...) then run
unchanged, with TE's parameter names. The kernels come from the active platform, through the hooks
that :func:`anytron_megatron.portable_te.binding.bind` was given.

Some names are missing on purpose: Megatron falls back to plain torch if it cannot import
``cpp_extensions``, ``cross_entropy``, ``cpu_offload``, ``graph`` or
``module.base.get_dummy_wgrad``. If Megatron requests a feature that this package does not compute (FP8,
userbuffers, delayed weight gradients, fused routing), it raises :class:`~anytron.base.errors.EngineError`.
``docs/reference/portable-te.md`` lists what each module supports.
"""

from anytron_megatron.portable_te import common, pytorch

# Megatron asks for 2.8 before it passes softmax_type, for 2.9 before return_max_logit, for 2.10 before num_splits;
# the last two are not here. From 2.7 on it imports pytorch.router by name.
__version__ = "2.8.0+anytron"

__all__ = ["__version__", "common", "pytorch"]
