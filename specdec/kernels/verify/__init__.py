"""Verify: which draft tokens are accepted, and the token after them. See README.md."""
