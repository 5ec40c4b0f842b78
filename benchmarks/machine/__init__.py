"""Experiments on the machine: what a step costs by its rows, and where its time goes."""
