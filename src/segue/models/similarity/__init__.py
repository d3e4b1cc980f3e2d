"""How a query is compared with items."""
