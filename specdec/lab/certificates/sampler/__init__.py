"""The exact distribution of what a sampler emits, found by enumeration."""
