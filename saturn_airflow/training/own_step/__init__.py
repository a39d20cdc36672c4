"""Jobs whose model has a training step of its own, as a LightningModule has."""
