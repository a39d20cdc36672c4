"""Searches for good schedules, and the processes that share them.

Temperatures, weights and efforts were set by experiment: ``benchmarks/planner.py`` prints the makespans and
gaps that they come to.
"""
