"""What people see: text fit for a terminal, tokens marked by their origin, tables.

Records of other rooms import this room, and it imports none of them.
"""
