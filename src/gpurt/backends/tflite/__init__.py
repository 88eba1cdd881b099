"""Parts of the TFLite driver."""
