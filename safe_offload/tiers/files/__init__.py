"""A directory as a tier: one file for each object, within a capacity."""
