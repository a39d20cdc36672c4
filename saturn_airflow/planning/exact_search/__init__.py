"""Exact searches and proofs."""
