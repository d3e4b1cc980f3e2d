"""Why an item is recommended: contributions of events, attention weights, as text and as a page."""
