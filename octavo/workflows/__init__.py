"""F6: the jobs. Each file is Config -> Report; they never import each other."""
