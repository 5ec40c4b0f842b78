"""Hybrid models: recurrent layers beside attention, or without it, in trees.

A recurrent layer's projections treat each row alone. Two small operators read other rows: a short causal convolution
and a recurrence. `operators` gives both a tree form that is made of the model's own one-token functions, `cache` holds
the states, and `families` lists the models.
"""
