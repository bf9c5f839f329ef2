"""Side by side with peers; never part of the test run. `docs/benchmarks.md` has the tables and what they show.

Each is run from the repository root: `python -m benchmarks.training --help`, and likewise `expert_path`,
`codecs` and `strategies`.
"""
