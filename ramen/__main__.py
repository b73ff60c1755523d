"""`python -m ramen`, the same as `ramen`."""

from ramen.cli import main

main()
