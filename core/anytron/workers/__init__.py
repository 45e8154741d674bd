"""Processes that hold engines: the interfaces of engines, the transfer of weights, executors."""
