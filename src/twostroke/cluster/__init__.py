"""A fleet: pools of servers for the two phases, and what passes between them."""
