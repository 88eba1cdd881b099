"""Parts of the DirectML driver."""
