"""The torch.cuda redirection: engine code that hard-codes ``torch.cuda`` runs on any device.

Megatron-Core says ``device=torch.cuda.current_device()`` in some 180 places, and ``.cuda()``,
``torch.cuda.Stream`` or ``"torch.cuda.FloatTensor"`` in a hundred more. While the redirection is
active all of that is answered by the platform's :class:`~anytron.platform.DeviceRuntime`.

How, and why so. Names are replaced by attribute, from tables, one file for each concern:

* not by a ``TorchFunctionMode`` (or dispatch mode): it sees neither ``torch.cuda.*``, ``Tensor.cuda``
  on the Python side, ``isinstance`` nor class attributes, and it costs a Python call for *every*
  torch operation, where only the few that take a device need one;
* not by replacing ``torch.device`` itself: half of the world calls ``isinstance(x, torch.device)``,
  and C++ makes instances of the real one;
* not by editing the engine's sources: each release would need it anew.

What cannot be redirected: ``tensor.device`` tells the truth, so ``tensor.device.type == "cuda"`` is
False; default arguments and closures that captured a ``torch.cuda`` function before the redirection
keep it (redirect before the engine is imported).
"""

from anytron_megatron.redirect.redirection import is_redirected, redirect_torch_cuda

__all__ = ["is_redirected", "redirect_torch_cuda"]
