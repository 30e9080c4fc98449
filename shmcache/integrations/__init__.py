"""The pool in other people's programs: nothing here is needed by the rest of the package."""
