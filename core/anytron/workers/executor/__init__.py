"""Executors: what starts, watches and ends the processes that engines live in."""
