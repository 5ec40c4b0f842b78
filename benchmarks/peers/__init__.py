"""draftree against the engines that people would pick instead, each in a process and an environment of its own."""
