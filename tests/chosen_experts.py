"""The experts to which the routers of a Hugging Face model send tokens: an oracle for engines that record them."""

import torch


@torch.no_grad()
def chosen_by(model, tokens):
    """The experts of every token of one sequence, as the routers answer: ``[T, L, K]``, in ascending order."""
    found = []
    gates = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [gate.register_forward_hook(lambda *call: found.append(call[-1][2])) for gate in gates]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(-1).values
