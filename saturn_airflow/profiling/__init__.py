"""Which trials to run, and running one.

Shares and factors that decide what is worth a trial were set by experiment: ``benchmarks/profiling.py``
prints what trials cost, and how good plans are after them.
"""
