"""Jobs whose function returns a ``Trainer`` of Hugging Face's transformers, which trains by itself."""
