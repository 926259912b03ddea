"""Write slots: keys and values of a window into a cache, in one launch. See README.md."""
