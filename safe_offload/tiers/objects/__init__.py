"""A bucket of an object store as a tier."""
