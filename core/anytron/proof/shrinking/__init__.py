"""``anytron verify --shrink``: a tiny model with random weights and the shape of a published one."""
