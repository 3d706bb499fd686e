"""Consistency policies: when gradients are applied, and who waits for whom. Pure."""
