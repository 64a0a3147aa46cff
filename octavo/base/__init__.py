"""F0: errors, environment, hardware, log and report. Imports neither torch nor anything that does."""
