"""The portable split-KV decode kernel."""
