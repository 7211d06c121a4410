"""What a deployment will do before it exists: estimates, simulation, search. Uses the real scheduler; never a
backend."""
