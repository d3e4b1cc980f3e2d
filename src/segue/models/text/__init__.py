"""Text encoders for item content."""
