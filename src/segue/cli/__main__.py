"""`python -m segue.cli`."""

from segue.cli import main

if __name__ == "__main__":
    main()
