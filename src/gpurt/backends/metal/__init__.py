"""Parts of the Metal driver."""
