"""Model families: each file names its differences."""
