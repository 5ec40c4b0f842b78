"""The runner in C for float32 on a CPU: bindings of the compiled functions."""
