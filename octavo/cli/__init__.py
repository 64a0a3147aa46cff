"""F8: the command line. Parse, call one workflow, render; what is shown and what an error looks like is in main.py."""
