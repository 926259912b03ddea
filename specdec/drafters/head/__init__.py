"""What all learned heads share: layers and passes over them, features, the parts of the target that
they borrow, and their drafter. Nothing of a family.
"""
