"""Decoders that continue an encoded history item by item."""
