"""Weights as a runner copied or packed them, and whether the model is still as it was then."""
