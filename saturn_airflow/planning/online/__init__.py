"""What happens to a plan: execution, boundaries between rounds, when it may end, simulation."""
