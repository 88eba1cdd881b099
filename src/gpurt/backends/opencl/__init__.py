"""Parts of the OpenCL driver."""
