"""Memory of a backend: accounting, the table of live handles, views, host buffers."""
