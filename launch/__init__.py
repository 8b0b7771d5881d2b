"""Launch: executors onto nodes and processes."""
