"""The interfaces through which training loops call engines, and the transfer of weights between engines."""
