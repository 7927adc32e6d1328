"""What watches a launch: counters, roles."""
