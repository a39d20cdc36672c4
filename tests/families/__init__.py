"""The matrix of model families: each trained under every technique next to a plain loop.

The models and the plain loop (:mod:`families.truth`) import nothing of Saturn.
"""
