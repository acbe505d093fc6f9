"""`python -m phloem`: the command where the script is not on the path."""

from phloem.cli import main

main()
