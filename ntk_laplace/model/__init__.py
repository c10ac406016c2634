"""The model and its data, as the caller gives them: network, likelihood, prior, and their predictions."""
