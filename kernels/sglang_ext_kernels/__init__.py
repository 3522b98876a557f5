"""GPU kernels, one operation per file, a plain reference beside each."""
