"""Advantage estimators: from the rewards of a step to an advantage for each token, one family per file."""
