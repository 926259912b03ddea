"""Truncation: top-k, top-p and min-p as one cutoff per row. See README.md."""
