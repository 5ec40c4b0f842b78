"""The runner of fixed shapes: a pass is recorded once (a CUDA graph where the device has them) and replayed."""
