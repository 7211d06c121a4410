"""Joining scheduler, backend and text: the loop, its construction, the offline API."""
