"""F7: jobs that chain workflows."""
