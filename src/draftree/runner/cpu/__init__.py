"""The runner in C on a CPU: bindings of the compiled functions."""
