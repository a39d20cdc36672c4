"""`saturn demo`: the nightly DAG on this machine, from nothing to trained models."""
