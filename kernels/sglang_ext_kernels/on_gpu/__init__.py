"""The Triton kernels; each is called by the operation of the same name one folder above.

Only these modules import Triton, so that everything else works where it is not installed. With
TRITON_INTERPRET=1 in the environment they run on the CPU, slowly, which is how they are tested there.
"""
