"""One file an engine: it loads the model of a folder and answers prompts of token ids, in every way that it has."""
