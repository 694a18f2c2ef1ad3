"""Other libraries' classes under their own names, strict: same arguments, same outputs.

Each file is one library. Where strict behaviour is a defect it is kept here, named in the
docstring, and absent from streampack's own classes.
"""
