"""Fleets that do not exist: pools of simulated replicas, what routes requests to them, and KV that moves between
them."""
