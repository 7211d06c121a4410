"""A plan as it is asked for: names become models and devices, options become deployments. It may look at this machine
and at files, which the planner itself does not."""
