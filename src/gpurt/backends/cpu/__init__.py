"""Parts of the CPU driver."""
