"""GPU kernels by what they work on, a plain reference beside each operation."""
