"""Programs of others that generate through specdec. None of them is needed to import this."""
