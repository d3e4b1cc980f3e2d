"""Logs in, batches out: log → events → vocabulary → split → sequences → batches. Never imports torch.

Nothing is imported here: who needs a batch need not wait for what reads logs.
"""
