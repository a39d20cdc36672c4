"""Searches for good schedules, and the processes that share them."""
