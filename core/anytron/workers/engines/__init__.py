"""The protocols of engines, which the loop uses, and the transfer of weights between engines."""
