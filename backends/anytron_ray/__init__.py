"""The executor ``ray``: ranks are on the machines of a Ray cluster, which accounts for their devices."""
