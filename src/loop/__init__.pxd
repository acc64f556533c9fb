# The loop's modules: inline functions that _core.pyx takes in, each file only from those named above it in its cimports.
