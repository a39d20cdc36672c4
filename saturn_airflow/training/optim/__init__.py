"""Optimizers and schedulers, what they keep, and which of them may have parts of parameters apart."""
