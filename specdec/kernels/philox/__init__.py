"""Philox: random bits as a function of counter and key, without state. See README.md."""
