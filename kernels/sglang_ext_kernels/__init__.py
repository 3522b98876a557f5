"""GPU kernels by subject, with a plain reference for each operation."""
