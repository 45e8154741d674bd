"""verl on the platforms of Anytron, without a change of verl and without an import in the user's script.

verl loads what stands in the entry-point group ``verl.plugins`` as it is imported: :mod:`anytron_verl.activate`. That
opens Anytron's layer in the process and makes its platform verl's. When verl chooses an engine, its own Megatron
engines come with the layer's phases around them, and with Anytron's layouts and masks.
"""
