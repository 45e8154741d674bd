"""Policy losses: from log-probs and advantages to a loss for each token, one family per file."""
