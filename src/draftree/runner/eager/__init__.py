"""The runner of llama-shaped models in tensor operations, on any device and in any type."""
