"""Several sweeps on one cluster: whose turn it is, how wide jobs run, when each is going to end."""
