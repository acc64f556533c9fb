# Cython's view of the headers beside these files, where every name is explained.
