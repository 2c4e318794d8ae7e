"""One-line breakages of our code, each of which the simulator must catch."""
