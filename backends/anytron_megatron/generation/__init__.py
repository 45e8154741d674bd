"""Generation with the modules that are trained: no second copy of the weights, and no exchange."""
