"""`python -m foredraft`: the `foredraft` command."""

from foredraft.cli.main import main

main()
