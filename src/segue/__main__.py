"""`python -m segue`, which is how `torchrun -m segue train …` starts each of its processes."""

from segue.cli import main

if __name__ == "__main__":
    main()
