"""What a folder's config says of how its weights are quantised: read once, method by method, into one value. Reads no
weights, and loads no numpy: the planner asks, too."""
