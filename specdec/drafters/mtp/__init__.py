"""Multi-token prediction: a module per depth, chained, with a cache that shifts by one row."""
