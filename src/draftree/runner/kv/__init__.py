"""Keys and values: the slot cache of requests, the cross attention of encoder-decoders, and how both are moved."""
