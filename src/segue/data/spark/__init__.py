"""The Spark engine: the same rules on the executors of a cluster."""
