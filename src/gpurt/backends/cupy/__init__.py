"""What the CUDA and the ROCm driver are made of: CuPy's binding of the runtimes."""
