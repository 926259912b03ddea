"""The window that repairs the depths of a multi-token prediction head. See README.md."""
