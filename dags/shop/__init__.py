"""The models and data of the example DAGs: small, real, and needing no network."""
