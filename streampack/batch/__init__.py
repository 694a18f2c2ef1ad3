"""The tensors of a training step, made from rows of tokens and segments.

In: rows of int32 tokens and their segments. Out: a dict of tensors, or the output of a
`batch_format`; attention masks and loss weights. May import `gather` and every room before it. The
first room that needs torch. Pure functions: no files, no clocks.

Cost: one pass over the tokens; see each format for its additional cost.
"""
