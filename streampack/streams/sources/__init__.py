"""Where samples are and what a sample is, a file for each class."""
