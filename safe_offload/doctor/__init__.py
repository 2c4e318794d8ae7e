"""What would go wrong with a server on this machine, found before it starts."""
