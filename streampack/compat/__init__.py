"""Other libraries' classes under their own names, strict: same arguments, same outputs.

Each file covers one library. If strict behavior is a defect, it is kept here and named in the
docstring. streampack's own classes do not share it.
"""
