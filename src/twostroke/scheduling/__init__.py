"""Choosing the next Step: queues, admission, chunks, slots. Standard library only; touches no tensor."""
