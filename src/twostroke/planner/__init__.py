"""Plans of hardware: what fits, how fast, for how many, at what price. Loads no model and runs no backend."""
