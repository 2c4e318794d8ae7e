"""What runs in the worker process: host memory and the copies to and from it."""
