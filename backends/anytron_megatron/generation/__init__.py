"""Generate with the modules that are trained: there is no second copy of the weights, and none is transferred."""
