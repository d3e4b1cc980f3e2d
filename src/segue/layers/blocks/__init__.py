"""Blocks over packed tokens: attention, HSTU, recurrent, convolutional."""
