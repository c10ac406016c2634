"""Scores that choose a model beside the evidence: conditional evidence from samples, bounds of the risk."""
