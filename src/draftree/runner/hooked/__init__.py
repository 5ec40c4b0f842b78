"""The runner of any family: it calls the model's own `forward`, with hooks on its layers while a pass lasts."""
