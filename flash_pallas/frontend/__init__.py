"""The way of a call from its arguments to a backend: checks, messages, choice, tuned tables."""
