"""What happens to a plan: execution, boundaries between rounds, learning from what was seen, simulation."""
