"""Encoder layers over packed tokens: Transformer, HSTU, NARM, recurrent, convolutional."""
