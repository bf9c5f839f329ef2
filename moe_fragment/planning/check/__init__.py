"""The planner against published figures: case files, one formula per kind of case, and the comparison."""
