"""The HTTP server: OpenAI's API in one process, the engine's loop in another. Needs the extra [server]."""
