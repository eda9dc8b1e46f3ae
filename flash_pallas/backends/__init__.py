"""One package or module per implementation of attention. None imports another."""
