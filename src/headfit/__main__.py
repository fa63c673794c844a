"""`python -m headfit`: the same as the `headfit` command. Nothing else belongs here."""

from headfit.cli import main

if __name__ == "__main__":
    main()
