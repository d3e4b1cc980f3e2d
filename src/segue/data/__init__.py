"""Logs in, batches out: log → events → vocabulary → split → sequences → batches. Never imports torch.

Nothing is imported here, so that code that needs only batches does not wait for the log readers.
"""
