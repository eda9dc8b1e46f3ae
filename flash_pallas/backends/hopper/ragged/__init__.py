"""The kernel of ragged attention over pages, for chunks of prompts on Hopper."""
