"""Which trials to run, and running one."""
