"""Storage in slots, one length per row, and attention over it: what targets and drafters are run
over. It knows no model.
"""
