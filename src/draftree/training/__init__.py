"""Training of what drafts inside the model, on answers that the model has made itself."""
