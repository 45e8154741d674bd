"""Redirect torch.cuda: run engine code that hard-codes ``torch.cuda`` on any device.

Megatron-Core has ``device=torch.cuda.current_device()`` in about 180 places, and ``.cuda()``,
``torch.cuda.Stream`` or ``"torch.cuda.FloatTensor"`` in a hundred more. While the redirection is
active, the platform's :class:`~anytron.device.runtime.DeviceRuntime` answers all of them.

The redirection replaces attributes, from tables, with one file for each concern. We do not use

* a ``TorchFunctionMode`` (or dispatch mode): it does not see ``torch.cuda.*``, ``Tensor.cuda`` on the
  Python side, ``isinstance`` or class attributes, and it costs a Python call for *every* torch
  operation, although only the few that take a device need one;
* a replacement of ``torch.device`` itself: much code calls ``isinstance(x, torch.device)``, and C++
  makes instances of the real class;
* edits of the engine's sources: each release would need them again.

Two things cannot be redirected. ``tensor.device`` is the real device, so ``tensor.device.type == "cuda"`` is
False. And default arguments and closures that captured a ``torch.cuda`` function earlier keep it, so
redirect before the engine is imported.
"""

from anytron_megatron.redirect.redirection import is_redirected, redirect_torch_cuda

__all__ = ["is_redirected", "redirect_torch_cuda"]
