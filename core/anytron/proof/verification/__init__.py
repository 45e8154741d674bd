"""``anytron verify``: check, before training, the computations of this model in this layout on this machine."""
