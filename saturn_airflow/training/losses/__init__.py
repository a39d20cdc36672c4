"""What a job minimises, and how the losses of a batch's parts make up that of the batch."""
