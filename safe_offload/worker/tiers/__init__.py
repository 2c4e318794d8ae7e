"""Where the bytes of host slots outlive the process, or are shared with others."""
