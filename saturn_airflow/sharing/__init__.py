"""Several sweeps on one cluster: whose turn it is, how wide jobs run, when each is going to end.

Weights and exponents of the rules were set by experiment: ``benchmarks/arrivals.py`` prints what sweeps come
to under them.
"""
