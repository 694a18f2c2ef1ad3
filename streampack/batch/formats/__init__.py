"""One function for each trainer's batch format, and a registry by name."""
