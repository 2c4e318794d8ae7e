"""Ways to copy between GPU blocks and host slots."""
