"""The training loop and what it is made of: batches, losses, optimizers, checkpoints. Imports torch."""
