"""The clients that people bring, each in an environment of its own, against one real server."""
