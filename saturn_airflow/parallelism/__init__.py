"""What the techniques are made of: replicas, shards, pipelines, spilling, and a model's anatomy."""
