"""Processes that hold engines: the protocols of engines, the transfer of weights, executors."""
