"""The engine process: models and the batches they answer."""
