"""`python -m draftree`."""

from draftree.cli import main

if __name__ == "__main__":
    main()
