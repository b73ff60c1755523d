"""The library: load a dataset, train, evaluate, publish and query, from a notebook or a script (docs/library.md).

`ramen.train` runs the same stage functions as the command line, on a dataset in memory. Knobs are those of
docs/config.md. The names that users import are in `ramen` itself.
"""
