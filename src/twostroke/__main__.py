"""`python -m twostroke` is the command `twostroke`."""

from twostroke.cli import main

if __name__ == "__main__":
    main()
