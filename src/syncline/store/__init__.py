"""The store: tables, the faces of weight sync that stand on them, and the file tier.

Import from its modules, or the public names from `syncline`; nothing is imported here.
"""
