"""MLflow: runs, estimates, history. The only room that imports it."""
