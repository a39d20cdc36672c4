"""The guard: the first steps of a technique compared with those of a plain loop."""
