"""Where one request's time went, and why, in words. Reads what the engine remembered; computes nothing but costs."""
